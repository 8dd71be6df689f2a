"""What the daemon reports: documents and metrics."""
