"""Kata's files."""
