"""The containers' cpusets inside the guests, through Kata's agent."""
