"""Keeping exclusive pCPUs quiet: what is due after passes and in audits (D22)."""
