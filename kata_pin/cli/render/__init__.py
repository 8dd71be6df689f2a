"""Reports as lines of text."""
