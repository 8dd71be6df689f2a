"""The kubelet's CPU manager checkpoint, read from its file.

Nothing lives longer than one call; the file is a few KiB and is read in each audit. What the bytes
mean: kata_pin.wire.kube.checkpoint.
"""

from __future__ import annotations

from typing import Final

from kata_pin.errors import ParseError, StateError
from kata_pin.model.node import KubeletState
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire.kube.checkpoint import MAX_BYTES, parse_checkpoint

DEFAULT_PATH: Final = "/var/lib/kubelet/cpu_manager_state"
"""Where the kubelet keeps it unless its --root-dir says otherwise."""


def read_kubelet(path: str = DEFAULT_PATH) -> KubeletState | None:
    """Return the kubelet's CPU assignments, None when there is no such file (no kubelet here).

    StateError names the file when it is damaged, its checksum is wrong, or it is not root's regular
    file: then nothing is known about exclusive CPUs, which is not the same as none being assigned.
    """
    try:
        return parse_checkpoint(read_owned(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (FileRefused, ParseError) as error:
        raise StateError(f"{path}: {error}") from error
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error
