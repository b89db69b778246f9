"""The broker (Redis or Valkey): who works on what, and word of what happened. Losing it loses nothing."""
