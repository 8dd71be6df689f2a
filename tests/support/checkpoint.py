"""The kubelet's CPU manager checkpoint, written as the kubelet does: anew, and renamed over it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kata_pin.peers.kubelet.checkpoint import checksum


def checkpoint(
    default: str, entries: Mapping[str, Mapping[str, str]] | None = None, *, policy: str = "static"
) -> str:
    """Return a checkpoint of version 4: pod uid to container name to its exclusive CPUs."""
    data: dict[str, object] = {"policyName": policy, "defaultCpuSet": default}
    if entries:
        data["entries"] = entries
    return packed(data)


def packed(data: Mapping[str, object]) -> str:
    """Return a checkpoint of version 4 with this content."""
    text = json.dumps(data)
    return json.dumps({"data": text, "dataChecksum": checksum(f"(string){text}")})


def replace(path: Path, text: str) -> None:
    """Put a file there at once, whatever was there."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text)
    fresh.rename(path)
