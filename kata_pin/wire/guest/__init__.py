"""Messages of the kata-agent, and texts from the guest."""
