"""Where each thread of a sandbox should run."""
