"""Sources of facts about containers, threads and CPUs."""
