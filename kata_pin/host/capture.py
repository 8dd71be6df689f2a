"""A captured host: the topology of another machine, from a file or a folder.

Either a folder with a `sys` in it, as copied from a host, or a listing as `scripts/capture-host`
prints it: one `path<TAB>content` a line, paths below `sys/`. A listing is grown into a folder that
is gone when this returns.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kata_pin.errors import HostError, ParseError
from kata_pin.host.files import read_bytes
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import read_topology
from kata_pin.model.topology import HostTopology

MAX_BYTES: Final = 16 * 1024 * 1024
MAX_FILES: Final = 200_000
"""Twenty files each of 8,192 CPUs, and as many again."""

_PLACE: Final = re.compile(r"sys(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){1,12}\Z")


def read_capture(path: str) -> HostTopology:
    """Return the captured topology; raises HostError or ParseError naming what is wrong."""
    if os.path.isdir(path):
        return read_topology(HostRoot(path))
    try:
        data = read_bytes(path, MAX_BYTES + 1)
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error
    if len(data) > MAX_BYTES:
        raise ParseError(f"longer than {MAX_BYTES} bytes", source=path)
    files = _listed(data.decode("utf-8", "replace"), path)
    with TemporaryDirectory(prefix="kata-pin-capture-") as folder:
        try:
            for place, content in files.items():
                target = Path(folder, place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(f"{content}\n", encoding="utf-8")
        except OSError as error:  # a file where another line needs a folder, or no room
            raise HostError("unfold", path, error.errno or 0) from error
        return read_topology(HostRoot(folder))


def _listed(text: str, source: str) -> dict[str, str]:
    """Return the files of a listing by their places."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > MAX_FILES:
        raise ParseError(f"more than {MAX_FILES} files", source=source)
    files: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        place, tab, content = line.partition("\t")
        if not tab or _PLACE.match(place) is None:
            raise ParseError("not `sys/...<TAB>content`", source=f"{source}:{number}", text=line)
        files[place] = content
    return files
