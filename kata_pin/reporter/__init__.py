"""The reporter: shows one node to the cluster. It has no rights on the node, and the only token."""
