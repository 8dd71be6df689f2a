"""Protocols and files of other programs: bytes to values and back, and the sessions with them.

    containerd, CRI-O  ttrpc, nri/, cri      the kubelet  kubelet/     Kata   kata, oci
    the guest's agent  agent/                QEMU         qemu         files  containerd, http

What comes from a peer is hostile: each reader bounds its size, and errors name where it is from.
"""
