"""The daemon as a process: configuration, start and stop, sockets, documents, metrics.

    app -> assembly -> compose (what commands without a daemon use too, offline.py)
    control.sock, status.sock -> commands -> documents

assembly.py still builds the options by name; tests/repo/test_layers.py lists what is left.
"""
