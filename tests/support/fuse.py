"""A file system of a few files whose server can refuse, or never answer: FUSE, spoken by hand.

    with FaultyFiles(folder, {"c1/config.json": b"{}"}) as files:
        files.refuse("c1/config.json", errno.EMFILE, times=1)    # the next open fails
        files.hang.add("page")                                   # reads of it never end

Needs root and /dev/fuse. Files belong to root and can be read by everybody. Source: the kernel's
include/uapi/linux/fuse.h, protocol 7.31. At the end the connection is cut, which wakes every
process that waits for an answer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

_IN = struct.Struct("=IIQQIIII")  # len, opcode, unique, node, uid, gid, pid, padding
_OUT = struct.Struct("=IiQ")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("=QQQQII")
_READ = struct.Struct("=QQI")
_INIT = struct.Struct("=IIIIHHIIHHI28x")

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READS, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INITS, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT = 25, 26, 27, 28, 29, 36
_DESTROY, _BATCH_FORGET = 38, 42
_SILENT = {_FORGET, _BATCH_FORGET, _INTERRUPT, _DESTROY}
_DIRECT_IO = 1  # nothing of a file is kept: every read is asked for


class FaultyFiles:
    """The mounted files; a context manager."""

    def __init__(self, at: Path, files: Mapping[str, bytes] | None = None) -> None:
        self.path = at
        self.hang: set[str] = set()
        self.opened: list[str] = []
        """The files that were opened, in order, refused or not."""
        self._files: dict[str, bytes] = {}
        self._nodes: dict[int, str] = {1: ""}
        self._refusals: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        for name, data in (files or {}).items():
            self.write(name, data)
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        at.mkdir(exist_ok=True)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        argv = ["mount", "-i", "-t", "fuse", "-o", options, "faulty", str(at)]
        subprocess.run(argv, check=True, pass_fds=(self._device,), capture_output=True)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cut the connection: whatever waits for an answer gets an error. Safe to repeat."""
        if self._device >= 0:
            for how in ("-f", "-l"):
                subprocess.run(["umount", how, str(self.path)], check=False, capture_output=True)
            self._thread.join(5)
            os.close(self._device)
            self._device = -1

    def write(self, name: str, data: bytes) -> None:
        """Add a file, or replace what it holds; its folders come into being."""
        with self._lock:
            self._files[name] = data

    def remove(self, folder: str) -> None:
        """Remove a folder with all that is in it."""
        with self._lock:
            for name in [one for one in self._files if one.startswith(f"{folder}/")]:
                del self._files[name]

    def refuse(self, name: str, number: int, *, times: int = 1) -> None:
        """Let the next so many openings of a file fail with an errno."""
        with self._lock:
            self._refusals[name] = [number] * times

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except InterruptedError:
                continue
            except OSError:  # ENODEV: unmounted
                return
            size, opcode, unique, node, *_ = _IN.unpack_from(request)
            body = request[_IN.size : size]
            if opcode in _SILENT:
                continue
            with self._lock:
                answer = self._answer(opcode, node, body)
            if answer is None:
                continue
            failed, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
            with contextlib.suppress(OSError):
                os.write(self._device, _OUT.pack(_OUT.size + len(data), failed, unique) + data)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int | None:
        """Return the answer's data, an errno, or None for no answer at all."""
        path = self._nodes.get(node)
        if opcode == _INITS:
            return _INIT.pack(7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 16, 0, 0)
        if path is None:
            return errno.ESTALE
        if opcode == _LOOKUP:
            return self._lookup(path, body.rstrip(b"\0").decode())
        if opcode == _GETATTR:
            found = self._attributes(path)
            return errno.ENOENT if found is None else struct.pack("=QII", 0, 0, 0) + found
        if opcode == _OPEN:
            self.opened.append(path)
            refusals = self._refusals.get(path)
            if refusals:
                return refusals.pop()
            return struct.pack("=QII", 0, 0 if path in self.hang else _DIRECT_IO, 0)
        if opcode == _READS:
            if path in self.hang:
                return None
            _, offset, size = _READ.unpack_from(body)
            return self._files.get(path, b"")[offset : offset + size]
        if opcode == _OPENDIR:
            return bytes(16)
        if opcode == _READDIR:
            return b""
        if opcode == _STATFS:
            return bytes(80)
        return b"" if opcode in {_RELEASE, _RELEASEDIR, _FLUSH} else errno.ENOSYS

    def _lookup(self, folder: str, name: str) -> bytes | int:
        path = f"{folder}/{name}".lstrip("/")
        found = self._attributes(path)
        if found is None:
            return errno.ENOENT
        node = next((one for one, known in self._nodes.items() if known == path), 0)
        if not node:
            node = len(self._nodes) + 1
            self._nodes[node] = path
        return _ENTRY.pack(node, 0, 0, 0, 0, 0) + found

    def _attributes(self, path: str) -> bytes | None:
        if path in self._files:
            mode, size = stat.S_IFREG | 0o644, len(self._files[path])
        elif not path or any(one.startswith(f"{path}/") for one in self._files):
            mode, size = stat.S_IFDIR | 0o755, 0
        else:
            return None
        number = hash(path) & 0x7FFFFFFF or 1
        return _ATTR.pack(number, size, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
