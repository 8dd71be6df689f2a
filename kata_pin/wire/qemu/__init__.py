"""QEMU's command line and QMP answers."""
