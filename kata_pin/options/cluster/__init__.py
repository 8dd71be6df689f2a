"""The reporter: shows one node to the cluster (docs/cluster.md).

    the daemon's documents -> decide -> publisher -> api -> the API server

It has no rights on the node, and the only token of the API server.
"""
