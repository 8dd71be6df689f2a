"""The service: it composes sources, vmm, host and policy, and keeps sandboxes pinned."""
