"""The broker: the only process of kata-pin that keeps rights while it runs (D23)."""
