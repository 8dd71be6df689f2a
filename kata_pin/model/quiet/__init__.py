"""What is kept off exclusive pCPUs beside other tasks: interrupts and the kernel's own work."""
