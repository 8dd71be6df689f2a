"""Settings: one table, YAML in, a frozen Config out."""
