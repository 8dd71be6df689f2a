"""Passes over sandboxes: observe, decide, act, read back (D1, D2).

    a mark -> sandboxes -> runner -> passes: observe -> placement -> linux/affinity -> counters

A pass needs nothing of what caused it, so that lost and doubled events do no harm (ADR 1). audit.py
finds drift that no event reports.
"""
