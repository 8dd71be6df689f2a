"""Codecs, bytes to values and back: no sockets, no files, no clocks."""
