"""Codecs: bytes to values and back, without sockets or clocks."""
