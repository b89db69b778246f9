"""From prompts to generated samples: which policy samples, in which chunks, with which noise."""
