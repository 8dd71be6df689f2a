"""Passes over sandboxes: when they run, what they observe and set, what came of them."""
