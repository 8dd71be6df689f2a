"""Why each thread and container is on its CPUs, as lines for an operator."""
