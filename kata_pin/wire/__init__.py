"""Codecs between bytes and values: no sockets, no files, no clocks."""
