"""The VMM of a sandbox: which process it is, what its threads do, which processes help it.

    processes -> checks, claims -> find (which one to believe, D5, D24) -> roles (D6)

kinds.py has one row per VMM; nothing else branches on which VMM it is. The host is read through the
Protocols of state_files.py.
"""
