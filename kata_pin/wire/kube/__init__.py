"""The kubelet's files, and CRI."""
