"""The daemon as a process: configuration, start and stop, sockets, documents, metrics.

    app -> assembly -> options (the core, which commands without a daemon use too, offline.py)
    control.sock, status.sock -> commands -> documents

Options are rows of a table (options.py): what a node has not switched on is not imported.
"""
