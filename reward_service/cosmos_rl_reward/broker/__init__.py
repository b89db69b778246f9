"""The broker (Redis or Valkey): job queues and events. No job is lost when it is lost."""
