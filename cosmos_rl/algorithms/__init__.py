"""Losses, advantages and decay schedules as pure functions of tensors. No config, no model, no device."""
