"""Watching that exclusive pCPUs run nothing but their owner's threads."""
