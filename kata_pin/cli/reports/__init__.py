"""Reports that the command line computes from documents; no terminal in here."""
