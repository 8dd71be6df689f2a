"""Documents as lines of text; no I/O but screen.py's."""
