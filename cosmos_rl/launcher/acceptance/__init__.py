"""Whether a valid configuration can run here: model, data, rewards, environment."""
