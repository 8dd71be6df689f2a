"""Decisions: pure functions over the model."""
