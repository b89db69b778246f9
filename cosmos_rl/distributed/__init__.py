"""Devices, process groups and keyed randomness. Knows neither data nor models."""
