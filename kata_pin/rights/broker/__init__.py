"""The broker: the only process of kata-pin that keeps rights while it runs (D23).

    a socket -> protocol -> policy (which processes) and rows (which operations) -> operations

Standard library only. It is started by path (`python3 -IS`), and nothing here imports another room.
"""
