"""The command line: what operators read and type."""
