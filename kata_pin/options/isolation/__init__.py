"""Who ran on exclusive pCPUs: `prove`, the watch, `top`, and what `check` measures (D21).

    perf, histograms or counters (linux/) -> decide (verdicts) -> tables (documents) -> render

watch.py is the daemon's task; prove_command.py and top_command.py are the commands.
"""
