"""The kubelet: its CPU manager checkpoint, its pods, and the CPUs of DRA claims (D15)."""
