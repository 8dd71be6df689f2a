"""Who runs on exclusive pCPUs, all the time: the daemon's watch, and `top` (D21).

    counters, then perf (linux/) -> placement/proof.py (verdicts) -> watch -> episodes

What `prove` and `check` measure is in cli/reports/prove.py.
"""
