"""The files that kata-pin installs on a node."""
