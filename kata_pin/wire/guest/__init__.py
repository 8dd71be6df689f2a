"""What a guest and its agent answer."""
