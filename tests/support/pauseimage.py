"""The pause image of pods, made on the spot from a static busybox: no registry is asked."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

IMAGE: Final = "localhost/pause:1"


def pause_archive(busybox: Path) -> bytes:
    """Return an OCI archive with one static program that waits for ever: busybox as `sleep`."""
    layer = _tar({"sleep": busybox.read_bytes()})
    blobs: dict[str, bytes] = {}

    def add(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    described_layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", **add(layer)}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/sleep", "infinity"]},
        "rootfs": {"type": "layers", "diff_ids": [described_layer["digest"]]},
    }
    described_config = {
        "mediaType": "application/vnd.oci.image.config.v1+json",
        **add(json.dumps(config).encode()),
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": described_config,
        "layers": [described_layer],
    }
    described = {
        "mediaType": kind,
        **add(json.dumps(manifest).encode()),
        "annotations": {
            "io.containerd.image.name": IMAGE,
            "org.opencontainers.image.ref.name": "1",
        },
    }
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()
    blobs["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    return _tar(blobs)


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
