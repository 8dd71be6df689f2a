"""Which containers exist and which cpuset each has, and what else survives a restart (D15).

    a hook -> hooks -> bundles -> containers (the registry) -> database (one SQLite file)

One transaction per event. history.py keeps what changed, pins.py what passes remember.
"""
