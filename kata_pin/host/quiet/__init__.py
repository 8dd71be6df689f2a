"""What disturbs pCPUs beside tasks, read from /proc and /sys. Nothing is written here."""
