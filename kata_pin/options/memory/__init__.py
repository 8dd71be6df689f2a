"""Memory of sandboxes that moves to the NUMA nodes of their vCPUs (docs/memory.md)."""
