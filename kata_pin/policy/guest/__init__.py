"""Which guest CPUs each container should use."""
