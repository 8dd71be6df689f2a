"""`doctor`: the prerequisites of this node and of its sandboxes, one row per check."""
