"""Measuring: reads the kernel's accounts of tasks, CPUs, interrupts and memory."""
