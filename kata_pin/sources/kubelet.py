"""The kubelet's CPU manager checkpoint, read in each audit; the bytes: wire/kube/checkpoint.py."""

from __future__ import annotations

from kata_pin.calls import DIRECT, Calls
from kata_pin.model.node import KubeletState
from kata_pin.owned_file import read_state
from kata_pin.wire.kube.checkpoint import MAX_BYTES, parse_checkpoint


def read_kubelet(path: str, calls: Calls = DIRECT) -> KubeletState | None:
    """Return the kubelet's CPU assignments, None without such a file (no kubelet here).

    StateError if the file is damaged, has a wrong checksum, or is not a regular file of root's.
    Then the exclusive CPUs are unknown, which is not the same as none being assigned.
    """
    return read_state(path, MAX_BYTES, parse_checkpoint, calls=calls)
