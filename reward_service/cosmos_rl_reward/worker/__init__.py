"""Where jobs are scored: one host process feeds one process per reward replica."""
