"""What makes a pass due: hooks, NRI, Kata's state, the checkpoint, processes, CPUs on and off.

    an event -> a record (records/) -> a mark of the sandboxes that it concerns (engine/)

Nothing here decides where a thread runs.
"""
