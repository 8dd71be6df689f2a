"""Putting files on a node, and taking away those that nobody changed since.

What was written is kept with its digest in a manifest, in the format of sha256sum(1), below the
same root; `sha256sum -c` on it tells what somebody changed. Links are comments there. Nothing is
kept in memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kata_pin.base.documents.answers import FileChange
from kata_pin.base.errors import HostError, KataPinError, ParseError
from kata_pin.cli.node.containerd import (
    RESTART,
    changed_at,
    importer,
    named_specs,
    places,
    running_since,
)
from kata_pin.cli.node.files import (
    HOOK_PATH,
    SPECS,
    UNIT,
    NodeFile,
    NodeLink,
    is_drop_in,
    registers_hook,
    serves_class,
    serves_containerd,
)
from kata_pin.linux.process import LockHolder, open_locked
from kata_pin.peers.containerd import runs_program

MANIFEST: Final = "/var/lib/kata-pin/installed"

LOCK: Final = "/run/kata-pin-install.lock"
"""Held while install and uninstall run on this node: two would each save half a manifest."""

MODIFIED: Final = "modified since it was installed"
"""Why a file is kept that somebody changed."""

NAMED_BY: Final = "named by "
"""Why a base runtime spec is kept: what follows is the file of containerd's configuration."""

_IMAGE: Final = "where /usr is read-only, kata-pin runs from its image (docs/cluster.md)"

NEW: Final = ".new"
"""What the name of a file ends with until it is complete."""

_NO_FILE: Final = b"\0not a regular file"
"""What a FIFO, a socket or a device is taken to hold: nothing that was installed."""

_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW

_FILE: Final = re.compile(r"(?P<mark>[0-9a-f]{64})  (?P<path>/.+)")
_LINK: Final = re.compile(r"# (?P<path>/.+?) (?P<mark>-> /.+)")
"""Lines of the manifest. The mark of a file is its digest, that of a link where it leads."""


def line(change: FileChange) -> str:
    """Return a change as a line of text."""
    return f"{change.verb:<9} {change.path}" + (f" ({change.reason})" if change.reason else "")


class NodeFiles:
    """The file system below `root`; paths given to it are those on the node."""

    def __init__(self, root: str = "/") -> None:
        self._root = os.path.realpath(root)

    def install(
        self,
        wanted: Iterable[NodeFile | NodeLink],
        keep: Callable[[str], bool] = lambda _: False,
    ) -> list[FileChange]:
        """Write the files that are missing or outdated, remove those no longer wanted.

        A file that somebody changed is kept, so are earlier ones that `keep` says and those that
        containerd names or runs. One that was there before, as a package's, is not in the
        manifest. Raises KataPinError.
        """
        known, files = self._manifest(), list(wanted)
        changes = [self._change(file, known.get(file.path)) for file in files]
        planned = list(zip(files, changes, strict=True))
        new = {
            file.path: _mark(file)
            for file, change in planned
            if change.verb == "wrote" and file.path not in known
        }
        paths = {file.path for file in files}
        left = {
            path: mark
            for path, mark in known.items()
            if path not in paths and not serves_class(path)
        }
        self._save(known | new)  # before they are there: ours, should this be killed
        try:
            for file, change in planned:
                if change.verb == "wrote":
                    self._put(file)
                if change.verb != "kept":
                    known[file.path] = _mark(file)
                if change.verb == "wrote" and registers_hook(file.path):
                    self._save(known | new)
        except (KataPinError, KeyboardInterrupt):
            self._save(known)  # uninstall removes what was written
            raise
        for path in filter(keep, tuple(left)):
            del left[path]
            changes.append(FileChange("kept", path, "from an earlier install --containerd"))
        changes += self._remove_all(dict(reversed(left.items())), known)
        self._save(known)
        return changes

    def uninstall(self, which: Callable[[str], bool] = bool) -> list[FileChange]:
        """Remove the installed files that are still as written, the last written first.

        `which` says of which paths; all without it. What containerd still names or runs is kept.
        """
        known = self._manifest()
        wanted = {path: mark for path, mark in known.items() if which(path)}
        changes = self._remove_all(dict(reversed(wanted.items())), known)
        self._save(known)
        return changes

    def add(self, wanted: Iterable[NodeFile]) -> list[FileChange]:
        """Write files beside those of `install`; one that somebody changed is kept."""
        files = {file.path: file for file in wanted}
        changes = self.install(files.values(), lambda _: True)
        return [change for change in changes if change.path in files]

    def preview(self, wanted: Iterable[NodeFile | NodeLink]) -> list[FileChange]:
        """Return what `install` and `add` would do to these files."""
        known = self._manifest()
        changes = [self._change(file, known.get(file.path)) for file in wanted]
        return [
            FileChange("would write", change.path) if change.verb == "wrote" else change
            for change in changes
        ]

    def would_keep(self, wanted: Iterable[NodeFile | NodeLink]) -> list[str]:
        """Return the paths that `install` would not write because somebody changed them."""
        return [change.path for change in self.preview(wanted) if change.verb == "kept"]

    def altered(self) -> tuple[list[str], list[str]]:
        """Return the installed files that are missing, and those that were modified since.

        Both empty if nothing was installed. Raises KataPinError.
        """
        marks = {
            path: (self._present(path, link=_leads(mark)), mark)
            for path, mark in self._manifest().items()
        }
        missing = [path for path, (now, _) in marks.items() if now is None]
        return missing, [path for path, (now, mark) in marks.items() if now not in {None, mark}]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs of install and uninstall away; below another root nothing is locked.

        Raises KataPinError while another one runs, HostError if the lock cannot be opened.
        """
        if self._root != "/":
            yield
            return

        def taken(holder: LockHolder) -> KataPinError:
            return KataPinError(
                f"another kata-pin install or uninstall is running{holder}",
                hint="run this again when it has ended",
            )

        with self._meaning("open", LOCK):
            descriptor = open_locked(LOCK, _LOCK_FLAGS, taken)
            while not os.fstat(descriptor).st_nlink:  # its holder removed it in between
                os.close(descriptor)
                descriptor = open_locked(LOCK, _LOCK_FLAGS, taken)
        try:
            yield
        finally:
            os.unlink(LOCK)
            os.close(descriptor)

    @property
    def installed(self) -> bool:
        """Whether `install` was run."""
        return os.path.exists(self._real(MANIFEST))

    @property
    def has_service(self) -> bool:
        """Whether the service is there, from `install` or a package."""
        return os.path.exists(self._real(UNIT))

    @property
    def has_others_service(self) -> bool:
        """Whether the service is there, but not from `install`: a package's."""
        return self.has_service and UNIT not in self._manifest()

    def _put(self, file: NodeFile | NodeLink) -> None:
        """Put a file in place at once: a runtime may be about to run the old one.

        It is on the disk afterwards: after a power failure an empty spec, or a drop-in without its
        spec, would keep containerd's CRI plugin from starting.
        """
        with self._replacing(file.path) as fresh:
            if isinstance(file, NodeLink):
                os.symlink(file.target, fresh)
                return
            with open(fresh, "xb") as opened:  # a new file: through no link
                opened.write(file.content)
                os.fchmod(opened.fileno(), file.mode)
                opened.flush()
                os.fsync(opened.fileno())

    def _change(self, file: NodeFile | NodeLink, known: str | None) -> FileChange:
        present = self._present(file.path, link=isinstance(file, NodeLink))
        # a file that makes a runtime run the hook is recorded whoever wrote it, because uninstall
        # has to remove it before the hook
        others = known is None and not (registers_hook(file.path) or serves_containerd(file.path))
        if present == _mark(file) and not others:
            return FileChange("unchanged", file.path)
        if present is not None and isinstance(file, NodeFile) and file.settings:
            return FileChange("kept", file.path, "settings are never overwritten")
        if present is not None and present != known:
            reason = "not from kata-pin install" if others else MODIFIED
            return FileChange("kept", file.path, reason)
        return FileChange("wrote", file.path)

    def _remove_all(self, wanted: dict[str, str], known: dict[str, str]) -> list[FileChange]:
        """Remove files; what is gone afterwards leaves `known`.

        What made a runtime run the hook leaves the manifest at once: its time says from when on
        containerd must have been started (`_not_restarted`).
        """
        changes = []
        for path, mark in wanted.items():
            change = self._remove(path, mark)
            changes.append(change)
            if change.verb == "removed":
                del known[path]
                if registers_hook(path):
                    self._save(known)
        return changes

    def _remove(self, path: str, mark: str) -> FileChange:
        if self._present(path, link=_leads(mark)) not in {None, mark}:
            return FileChange("kept", path, MODIFIED)
        user = self.used_by_containerd(path)
        if user:
            return FileChange("kept", path, user)
        self._unlink(path)
        folder = os.path.dirname(path)
        with contextlib.suppress(OSError):  # only folders of our own that are empty now
            while "kata-pin" in folder.split("/") or folder == f"{UNIT}.d":
                os.rmdir(self._real(folder))
                folder = os.path.dirname(folder)
        return FileChange("removed", path)

    def _unlink(self, path: str) -> None:
        """Remove a file, and what a killed install was writing in its place."""
        for name in (path, f"{path}{NEW}"):
            with self._meaning("remove", path), contextlib.suppress(FileNotFoundError):
                os.unlink(self._real(name))

    def used_by_containerd(self, path: str) -> str:
        """Return why containerd still needs one of our files, or nothing.

        Without a file that its configuration imports by name it does not start, without a base
        runtime spec that it names its CRI plugin does not, and without a hook that a spec names
        containers do not.
        """
        if is_drop_in(path):
            file = importer(path, lambda one: self._read(one) or b"", self._root)
            advice = "remove that import, then run this again"
            return f"imported by name in {file}: {advice}" if file else ""
        if path != HOOK_PATH and not path.startswith(SPECS):
            return ""
        for spec, file in named_specs(lambda one: self._read(one) or b"", self._root).items():
            if not spec:
                return f"{file} cannot be read, and may name it"
            if path == spec:
                return f"{NAMED_BY}{file}"
            if path == HOOK_PATH and runs_program(self._read(spec) or b"", HOOK_PATH):
                return f"used by containerd's {spec}"
        return self._not_restarted()

    def _not_restarted(self) -> str:
        """Return why containerd still has hooks that its files no longer name, or nothing.

        It has the specs in memory from its start on. They stopped being named when a drop-in was
        removed, which the manifest's time says, or when somebody edited or removed a file.
        """
        if self._root != "/" or not any(path.startswith(SPECS) for path in self._manifest()):
            return ""
        paths = (MANIFEST, *places(lambda one: self._read(one) or b""))
        changed = changed_at(map(self._real, paths))
        if not running_since(changed):
            return ""
        return f"containerd runs with it: {RESTART}, then run this again"

    def _manifest(self) -> dict[str, str]:
        """Return path -> mark of what was installed, in the order of installation."""
        content = (self._read(MANIFEST) or b"").decode("utf-8", "replace")
        known = {}
        for line in content.splitlines():
            match = _FILE.fullmatch(line) or _LINK.fullmatch(line)
            if match is None or ".." in match["path"].split("/"):
                hint = "correct that line, or remove it and the file that it is about"
                raise ParseError("not a sha256sum line", source=MANIFEST, text=line, hint=hint)
            known[match["path"]] = match["mark"]
        return known

    def _save(self, known: dict[str, str]) -> None:
        if known:
            lines = "".join(
                f"# {path} {mark}\n" if _leads(mark) else f"{mark}  {path}\n"
                for path, mark in known.items()
            )
            if lines.encode() != self._read(MANIFEST):  # its time says when something changed
                self._put(NodeFile(MANIFEST, lines.encode()))
            return
        self._unlink(MANIFEST)
        with contextlib.suppress(OSError):  # a pod has it mounted
            os.rmdir(os.path.dirname(self._real(MANIFEST)))

    def _present(self, path: str, *, link: bool) -> str | None:
        """Return the mark of what is there, None for nothing; a file in a link's place has one.

        So has a link in a file's place that leads out of the root, where nothing is read.
        """
        real = self._real(path)
        with self._meaning("read", path):
            if os.path.islink(real) and (link or not self._holds(os.path.realpath(real))):
                return f"-> {os.readlink(real)}"
        content = self._read(path)
        return None if content is None else _digest(content)

    def _read(self, path: str) -> bytes | None:
        with self._meaning("read", path):
            try:
                descriptor = os.open(self._real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a FIFO may never end
                    return _NO_FILE
                return file.read()

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Yield an unused path beside `path`, which takes its place afterwards."""
        real = self._real(path)
        fresh = f"{real}{NEW}"
        with self._meaning("write", path):
            _make_folder(os.path.dirname(real))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
            try:
                yield fresh
                os.rename(fresh, real)
            except (OSError, KeyboardInterrupt):
                with contextlib.suppress(OSError):
                    os.unlink(fresh)
                raise
            _sync_folder(real)

    def _real(self, path: str) -> str:
        """Return where `path` of the node lies; KataPinError if a link leads out of the root."""
        real = os.path.join(self._root, path.lstrip("/"))
        folder = os.path.realpath(os.path.dirname(real))
        if not self._holds(folder):
            raise KataPinError(f"cannot use {path}: a link leads out of {self._root}")
        return os.path.join(folder, os.path.basename(real))

    def _holds(self, real: str) -> bool:
        """Whether a path without links lies below the root."""
        return os.path.commonpath([real, self._root]) == self._root

    @contextlib.contextmanager
    def _meaning(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            real = self._root.rstrip("/") + path
            hint = _IMAGE if error.errno == errno.EROFS and path.startswith("/usr/") else ""
            raise HostError(f"cannot {operation}", real, error.errno or 0, hint=hint) from error


def _make_folder(path: str) -> None:
    """Make a folder and those above it, open to users whatever the umask: hooks of theirs run."""
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        os.mkdir(path)
        os.chmod(path, 0o755)  # noqa: S103 - as a package would make it


def _sync_folder(path: str) -> None:
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _mark(file: NodeFile | NodeLink) -> str:
    return f"-> {file.target}" if isinstance(file, NodeLink) else _digest(file.content)


def _leads(mark: str) -> bool:
    """Return whether a mark is that of a link."""
    return mark.startswith("-> ")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
