"""Exact resume (sharded state with a commit marker) and export to stock diffusers and PEFT folders."""
