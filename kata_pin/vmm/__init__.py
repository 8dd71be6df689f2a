"""The VMM of a sandbox: which process it is, what its threads do, which helpers it has."""
