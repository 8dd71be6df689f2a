"""Which pCPUs should be quiet, and what that takes: pure."""
