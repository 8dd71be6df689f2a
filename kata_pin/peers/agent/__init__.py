"""The kata-agent in the guest: its messages, and a client over vsock or hybrid vsock (D12)."""
