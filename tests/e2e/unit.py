"""The installed systemd unit, and the daemon behind it as its sockets tell.

No command line of kata-pin: each start of Python costs seconds in a lab machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kata_pin.base.errors import KataPinError
from kata_pin.service.protocol import ask
from tests.e2e.node import Node

UNIT: Final = "kata-pin.service"
RUNTIME_DIR: Final = Path("/run/kata-pin")
CONFIG: Final = Path("/etc/kata-pin/config.yaml")
DROP_INS: Final = Path(f"/run/systemd/system/{UNIT}.d")

Json = dict[str, Any]


class Unit:
    """kata-pin.service of this machine."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # ---- systemd -------------------------------------------------------------------------

    def show(self, *names: str) -> dict[str, str]:
        """Return properties of the unit."""
        text = self._node.run(["systemctl", "show", UNIT, "-p", ",".join(names)])
        return dict(line.partition("=")[::2] for line in text.splitlines())

    @property
    def pid(self) -> int:
        """The daemon's pid, 0 while there is none."""
        return int(self.show("MainPID")["MainPID"])

    def systemctl(self, verb: str) -> None:
        """Run a verb on the unit; systemctl waits for what Type=notify promises."""
        self._node.run(["systemctl", verb, UNIT], seconds=60)

    def wait_running(self, *, other_than: int = 0) -> int:
        """Wait until the unit is active and its daemon answers; return its pid."""
        found = 0

        def right() -> bool:
            nonlocal found
            shown = self.show("ActiveState", "MainPID")
            found = int(shown["MainPID"])
            return (
                shown["ActiveState"] == "active" and found not in {0, other_than} and self.answers()
            )

        self._node.wait(right, f"{UNIT} active and answering", seconds=30)
        return found

    def wait_starting(self, *, other_than: int) -> int:
        """Wait until another daemon has opened the registry, long before it is up; its pid."""
        found = 0

        def right() -> bool:
            nonlocal found
            found = self.pid
            return found not in {0, other_than} and _has_open(found, RUNTIME_DIR / "registry.db")

        self._node.wait(right, f"{UNIT} about to take in what there is", seconds=30)
        return found

    @contextlib.contextmanager
    def drop_in(self, name: str, text: str) -> Iterator[None]:
        """Restart the unit with a drop-in, and without it at the end."""
        file = DROP_INS / f"{name}.conf"
        DROP_INS.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        try:
            self._node.run(["systemctl", "daemon-reload"], seconds=60)
            self.systemctl("restart")
            yield
        finally:
            file.unlink()
            self._node.run(["systemctl", "daemon-reload"], seconds=60)
            self.systemctl("restart")

    # ---- the daemon ----------------------------------------------------------------------

    def ask(self, verb: str, **arguments: object) -> Json:
        """Return the document of a verb of the control socket."""
        path = str(RUNTIME_DIR / "control.sock")
        document: Json = json.loads(bytes(ask(path, verb, arguments, 30.0 * self._node.scale)))
        return document

    def answers(self) -> bool:
        """Whether a daemon answers."""
        try:
            self.ask("ping")
        except KataPinError:
            return False
        return True

    def state(self) -> Json:
        """Return the state document."""
        return self.ask("state")

    def sandbox(self, sandbox_id: str) -> Json:
        """Return what the state document says of a sandbox, nothing if it is not in it."""
        found = [one for one in self.state()["sandboxes"] if one["id"] == sandbox_id]
        return found[0] if found else {}

    def spooled(self) -> list[str]:
        """Return the messages that wait in the spool."""
        return sorted(one.name for one in (RUNTIME_DIR / "spool").glob("*.msg"))

    # ---- its settings --------------------------------------------------------------------

    @contextlib.contextmanager
    def settings(self, **settings: Any) -> Iterator[None]:
        """Have the daemon read settings (SIGHUP), and those of before at the end."""
        try:
            with self.file(json.dumps({"version": 1, **settings})):
                self.reload()
                yield
        finally:
            self.reload()

    @contextlib.contextmanager
    def restarted_with(self, **settings: Any) -> Iterator[None]:
        """Restart the unit with settings that no reload changes, and with those of before."""
        try:
            with self.file(json.dumps({"version": 1, **settings})):
                self.systemctl("restart")
                self.wait_running()
                yield
        finally:
            self.systemctl("restart")
            self.wait_running()

    @contextlib.contextmanager
    def file(self, text: str) -> Iterator[None]:
        """Replace the file of the settings, and put it back at the end; nobody is told."""
        before = CONFIG.read_bytes()
        try:
            CONFIG.write_text(text)
            yield
        finally:
            CONFIG.write_bytes(before)

    def reload(self) -> None:
        """Reload, as the unit's ExecReload does it; wait until the daemon has said so."""
        began = time.time() - 1  # the journal is asked in whole seconds
        count = self._reloads(began)
        self.systemctl("reload")
        self._node.wait(lambda: self._reloads(began) > count, "the configuration reloaded")

    def _reloads(self, since: float) -> int:
        return self.journal(since).count("configuration reloaded")

    def journal(self, since: float = 0) -> str:
        """Return what the unit's daemons, and systemd of the unit, have said since a time()."""
        after = f"--since=@{since:.0f}"
        return self._node.run(["journalctl", "-u", UNIT, "-o", "cat", "--no-pager", after])


def _has_open(pid: int, file: Path) -> bool:
    """Whether a process has a file open."""
    with contextlib.suppress(OSError):  # it may end while we look
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") == str(file):
                    return True
    return False
