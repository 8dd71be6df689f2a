"""The modules beside .proto files, from protoc's descriptors: `scripts/proto` runs it.

python -m tests.support.proto_modules DESCRIPTOR_SET FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet

WIDTH = 72  # bytes a line at most; most are written as one character


def main(descriptor_set: Path, folder: Path) -> None:
    """Write one module for each file of a FileDescriptorSet."""
    for file in FileDescriptorSet.FromString(descriptor_set.read_bytes()).file:
        for message in file.message_type:
            _shorten(message)
        path = folder / f"{file.name.removesuffix('.proto')}_pb2.py"
        path.write_text(_module(file.name, file.SerializeToString(deterministic=True)))


def _shorten(message: Any) -> None:
    """Remove what follows from other fields: names of JSON."""
    for field in message.field:
        field.ClearField("json_name")
    for inner in message.nested_type:
        _shorten(inner)


def _module(name: str, data: bytes) -> str:
    pieces = [data[start : start + WIDTH] for start in range(0, len(data), WIDTH)]
    lines = "\n".join(f"    {piece!r}" for piece in pieces)
    return (
        f'"""Messages of {name}: written by scripts/proto, do not edit."""\n\n'
        "from kata_pin.peers.proto import define\n\n"
        f"define(\n    __name__,\n{lines},\n)\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
