"""Why everything is where it is, as lines for a person."""
