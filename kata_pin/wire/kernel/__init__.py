"""Text and records in which the kernel accounts for time: tasks, CPUs, interrupts, memory."""
