"""The kubelet's CPU manager checkpoint, read from its file in each audit.

What the bytes mean: wire/kube/checkpoint.py.
"""

from __future__ import annotations

from typing import Final

from kata_pin.model.node import KubeletState
from kata_pin.owned_file import read_state
from kata_pin.wire.kube.checkpoint import MAX_BYTES, parse_checkpoint

DEFAULT_PATH: Final = "/var/lib/kubelet/cpu_manager_state"
"""The kubelet's file unless its --root-dir is set."""


def read_kubelet(path: str = DEFAULT_PATH) -> KubeletState | None:
    """Return the kubelet's CPU assignments, None without such a file (no kubelet here).

    StateError if the file is damaged, has a wrong checksum, or is not a regular file of root's.
    Then the exclusive CPUs are unknown, which is not the same as none being assigned.
    """
    return read_state(path, MAX_BYTES, parse_checkpoint)
