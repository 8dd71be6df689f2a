"""The daemon as a process: composition, control socket, start and stop."""
