"""The rights that the daemon lacks: the broker, and the table of operations that need it (D23).

    a room -> calls (the class Calls) -> in this process, or client -> socket -> broker/

Public: calls.py. The daemon decides and has no rights; the broker has rights and decides nothing.
docs/broker.md has the protocol and what is checked.
"""
