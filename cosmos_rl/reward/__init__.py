"""Scores for generated media: local functions, the reward service, and how several of them become one number."""
