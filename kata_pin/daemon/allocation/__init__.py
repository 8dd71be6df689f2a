"""Our own CPU allocator: its state, and how the runtime gets to know of it."""
