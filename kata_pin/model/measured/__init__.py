"""What was measured: counters as the kernel keeps them, and what follows from two of them."""
