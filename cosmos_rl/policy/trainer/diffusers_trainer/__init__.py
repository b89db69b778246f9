"""Jobs that train a diffusers pipeline."""
