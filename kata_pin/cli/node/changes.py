"""Putting files on a node, and taking away those that nobody changed since.

What was written is kept with its digest in a manifest, in the format of sha256sum(1), below the
same root; `sha256sum -c` on it tells what somebody changed. Nothing is kept in memory. Out of
scope: what the files hold (files.py) and what a release of the pins means (the daemon).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Final

from kata_pin.cli.node.files import HOOK_PATH, NodeFile
from kata_pin.errors import HostError, ParseError
from kata_pin.model.reports.settings import FileChange

MANIFEST: Final = "/var/lib/kata-pin/installed"
CONTAINERD_CONFIG: Final = "/etc/containerd/config.toml"

_BASE_SPEC: Final = re.compile(r"^\s*base_runtime_spec\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)


def line(change: FileChange) -> str:
    """Return a change as a line of text."""
    return f"{change.verb:<9} {change.path}" + (f" ({change.reason})" if change.reason else "")


class Node:
    """The file system below `root`; paths given to it are those on the node."""

    def __init__(self, root: str = "/") -> None:
        self._root = os.path.realpath(root)

    def install(self, wanted: Iterable[NodeFile]) -> list[FileChange]:
        """Write the files that are missing or outdated, remove those no longer wanted.

        A file that somebody changed is kept. Raises HostError, ParseError for a bad manifest.
        """
        known = self._manifest()
        changes = []
        left = dict(known)
        for file in wanted:
            change = self._write(file, known.get(file.path))
            left.pop(file.path, None)
            if change.verb != "kept":
                known[file.path] = _digest(file.content)
            changes.append(change)
        changes += self._remove_all(left, known)
        self._save(known)
        return changes

    def uninstall(self, *, folder: str = "/") -> list[FileChange]:
        """Remove the installed files below `folder` that nobody changed, the last written first."""
        known = self._manifest()
        wanted = {path: digest for path, digest in known.items() if path.startswith(folder)}
        changes = self._remove_all(dict(reversed(wanted.items())), known)
        self._save(known)
        return changes

    def _write(self, file: NodeFile, known: str | None) -> FileChange:
        present = self._read(file.path)
        if present == file.content:
            return FileChange("unchanged", file.path)
        if present is not None and file.settings:
            return FileChange("kept", file.path, "settings are never overwritten")
        if present is not None and _digest(present) != known:
            return FileChange("kept", file.path, "modified since it was installed")
        self._replace(file.path, file.content, file.mode)
        return FileChange("wrote", file.path)

    def _remove_all(self, wanted: dict[str, str], known: dict[str, str]) -> list[FileChange]:
        """Remove files; what is gone afterwards leaves `known`."""
        changes = []
        for path, digest in wanted.items():
            change = self._remove(path, digest)
            changes.append(change)
            if change.verb == "removed":
                del known[path]
        return changes

    def _remove(self, path: str, digest: str) -> FileChange:
        present = self._read(path)
        if present is not None and _digest(present) != digest:
            return FileChange("kept", path, "modified since it was installed")
        user = self._base_spec_with_hook() if path == HOOK_PATH else ""
        if user:
            return FileChange("kept", path, f"used by containerd's {user}")
        with self._meaning("remove", path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._real(path))
        with contextlib.suppress(OSError):  # only a folder of our own that is empty now
            if os.path.basename(os.path.dirname(path)) == "kata-pin":
                os.rmdir(os.path.dirname(self._real(path)))
        return FileChange("removed", path)

    def _base_spec_with_hook(self) -> str:
        """Return the base runtime spec of containerd that names the hook, or nothing."""
        settings = self._read(CONTAINERD_CONFIG) or b""
        for path in _BASE_SPEC.findall(settings.decode("utf-8", "replace")):
            if HOOK_PATH.encode() in (self._read(path) or b""):
                return str(path)
        return ""

    def _manifest(self) -> dict[str, str]:
        """Return path -> digest of what was installed, in the order of installation."""
        content = (self._read(MANIFEST) or b"").decode("utf-8", "replace")
        known = {}
        for line in content.splitlines():
            match = re.fullmatch(r"([0-9a-f]{64})  (/.+)", line)
            if match is None or ".." in match[2].split("/"):
                raise ParseError("not a sha256sum line", source=MANIFEST, text=line)
            known[match[2]] = match[1]
        return known

    def _save(self, known: dict[str, str]) -> None:
        if known:
            lines = "".join(f"{digest}  {path}\n" for path, digest in known.items())
            self._replace(MANIFEST, lines.encode(), 0o644)
            return
        with self._meaning("remove", MANIFEST), contextlib.suppress(FileNotFoundError):
            os.unlink(self._real(MANIFEST))
            os.rmdir(os.path.dirname(self._real(MANIFEST)))

    def _read(self, path: str) -> bytes | None:
        with self._meaning("read", path):
            try:
                with open(self._real(path), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def _replace(self, path: str, content: bytes, mode: int) -> None:
        """Put a file in place at once: a runtime may be about to run the old one."""
        real = self._real(path)
        fresh = f"{real}.new"
        with self._meaning("write", path):
            os.makedirs(os.path.dirname(real), exist_ok=True)
            with open(fresh, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), mode)
            os.rename(fresh, real)

    def _real(self, path: str) -> str:
        """Return where `path` of the node lies; HostError if a link leads out of the root."""
        real = os.path.join(self._root, path.lstrip("/"))
        folder = os.path.realpath(os.path.dirname(real))
        if os.path.commonpath([folder, self._root]) != self._root:
            raise HostError("reach", f"{path}: a link leads out of {self._root}")
        return os.path.join(folder, os.path.basename(real))

    @contextlib.contextmanager
    def _meaning(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HostError(operation, self._root + path, error.errno or 0) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
