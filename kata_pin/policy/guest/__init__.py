"""Which guest CPU each vCPU thread is, and which guest CPUs each container should use."""
