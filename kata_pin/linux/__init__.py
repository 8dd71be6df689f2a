"""What the kernel tells and takes: /proc, cgroups, affinity, perf, interrupts, events.

    text of /proc and /sys -> proc, cgroups, counters -> values of base/
    an affinity            -> affinity -> the thread, with its identity checked first (D5, D7)

Every path hangs off a HostRoot (files.py), so that a test can put files there. Calls that need
rights go through the HostRoot's Calls. Nothing here knows what a sandbox is.
"""
