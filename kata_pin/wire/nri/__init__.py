"""NRI's messages and framing."""
