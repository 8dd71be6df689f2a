"""Linux as observed and acted on: processes, threads, affinity, topology, cpusets."""
