"""An OCI image as one archive: layers of sorted files without times, and the JSON that names them.

Facts: OCI image specification 1.1 (image-layout.md, config.md, manifest.md, annotations.md).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its compressed bytes, and the digest of the tar in it."""

    data: bytes
    diff_id: str
    text: str


def layer(folder: Path, paths: Iterable[Path], text: str) -> Layer:
    """Return a layer of these files below a folder: root's, without times, modes made equal."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in paths:
            entry = archive.gettarinfo(str(path), arcname=str(path.relative_to(folder)))
            if not (entry.isreg() or entry.isdir() or entry.issym()):
                raise ValueError(f"{path} is no file, folder or link")
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = 0
            executable = entry.isdir() or (entry.isreg() and bool(entry.mode & 0o100))
            entry.mode = 0o777 if entry.issym() else 0o755 if executable else 0o644
            if entry.isreg():
                with path.open("rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    plain = content.getvalue()
    return Layer(gzip.compress(plain, 9, mtime=0), _sha256(plain), text)


@dataclass(frozen=True, slots=True)
class Image:
    """An image: its manifest's digest, and the blobs by theirs."""

    digest: str
    blobs: Mapping[str, bytes]
    manifest: bytes
    name: str


def image(
    layers: Sequence[Layer],
    *,
    name: str,
    arch: str,
    created: str,
    config: Mapping[str, Any],
) -> Image:
    """Return the image of these layers; `name` has a host part and a tag, `created` is RFC 3339."""
    document = {
        "created": created,
        "architecture": arch,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one.diff_id}" for one in layers]},
        "history": [{"created": created, "created_by": one.text} for one in layers],
    }
    encoded = _json(document)
    blobs = {_sha256(one.data): one.data for one in layers}
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, encoded),
            "layers": [_descriptor(_LAYER, one.data) for one in layers],
            "annotations": config["Labels"],
        }
    )
    blobs[_sha256(encoded)] = encoded
    blobs[_sha256(manifest)] = manifest
    return Image(f"sha256:{_sha256(manifest)}", blobs, manifest, name)


def archive(made: Image) -> bytes:
    """Return the image as a tar of the OCI layout: podman load and ctr image import read it."""
    annotations = {
        "org.opencontainers.image.ref.name": made.name,
        "io.containerd.image.name": made.name,
    }
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{**_descriptor(_MANIFEST, made.manifest), "annotations": annotations}],
    }
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, data in _layout(made, index):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def _layout(made: Image, index: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    yield "oci-layout", _json({"imageLayoutVersion": "1.0.0"})
    yield "index.json", _json(index)
    for digest, data in sorted(made.blobs.items()):
        yield f"blobs/sha256/{digest}", data


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{_sha256(data)}", "size": len(data)}


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
