"""One module per command or family: options in, a rendered report out."""
