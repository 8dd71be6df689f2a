"""The kata-agent's client, over vsock or hybrid vsock."""
