"""What a node may also want, a room each; the core imports none, nor does one another."""
