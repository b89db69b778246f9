"""Launchers that the documents name."""
