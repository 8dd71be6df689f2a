"""Finding the VMM of a sandbox and the roles of its threads."""
