"""What survives a restart: one SQLite file, one transaction per event."""
