"""One module per command: options in, a rendered report out."""
