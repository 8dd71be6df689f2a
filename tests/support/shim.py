"""A stand-in for Kata's shim: it starts QEMU, holds qmp.sock, plugs and unplugs vCPUs.

Used as an object in the caller's process, or as a process of its own (shim_process.py) so that QEMU
has a parent whose command line says `-id <sandbox>`. As in Kata, vCPUs are plugged from the highest
slot down with ids cpu-0, cpu-1 ..., and the one plugged last goes first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

from tests.support.monitor import Monitor
from tests.support.waiting import wait_for

QMP_FD = "{qmp-fd}"
"""In a command line: replaced by the number of the listening descriptor of qmp.sock."""


class Shim(Protocol):
    """What a test can ask of the stand-in, wherever it runs."""

    @property
    def pid(self) -> int:
        """The process that is QEMU's parent."""

    def start(self, argv: list[str], qmp_path: str, log_path: str) -> int:
        """Start QEMU, wait until QMP answers, keep the socket; return QEMU's pid."""

    def hold(self) -> None:
        """Take qmp.sock, as Kata does from the end of sandbox creation on."""

    def let_go(self) -> None:
        """Free qmp.sock: the window of the sandbox's createRuntime hooks."""

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a QMP command in the held session, or in a short one when it is not held."""

    def plug(self, count: int) -> list[str]:
        """Hotplug vCPUs, highest free slot first; return their ids."""

    def unplug(self, count: int) -> list[str]:
        """Unplug the vCPUs plugged last, and wait until their threads are gone.

        Do not plug again after this under TCG: QEMU 7.2 crashes.
        """

    def stop(self) -> None:
        """Kill QEMU and reap it."""

    def kill(self) -> None:
        """Vanish without cleaning up: QEMU is left an orphan."""


class LocalShim:
    """The stand-in as an object: QEMU is a child of the calling process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._qmp_path = ""
        self._plugged: list[str] = []
        self._count = 0

    @property
    def pid(self) -> int:
        """The calling process."""
        return os.getpid()

    def start(self, argv: list[str], qmp_path: str, log_path: str) -> int:
        """See Shim.start."""
        self._qmp_path = qmp_path
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(qmp_path)
            listener.listen(1)
            log = stack.enter_context(Path(log_path).open("ab"))
            number = str(listener.fileno())
            self._process = subprocess.Popen(
                [part.replace(QMP_FD, number) for part in argv],
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self.hold()
        except BaseException as error:
            self.stop()
            said = Path(log_path).read_text(errors="replace").strip()
            raise RuntimeError(f"QEMU did not start: {error}: {said[-400:]}") from error
        return self._process.pid

    def hold(self) -> None:
        """See Shim.hold."""
        if self._monitor is None:
            self._monitor = Monitor(self._qmp_path)

    def let_go(self) -> None:
        """See Shim.let_go."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def execute(self, command: str, **arguments: Any) -> Any:
        """See Shim.execute."""
        if self._monitor is not None:
            return self._monitor.execute(command, **arguments)
        monitor = Monitor(self._qmp_path)
        try:
            return monitor.execute(command, **arguments)
        finally:
            monitor.close()

    def plug(self, count: int) -> list[str]:
        """See Shim.plug."""
        slots = self.execute("query-hotpluggable-cpus")
        free = [slot for slot in slots if "qom-path" not in slot]
        if count > len(free):
            raise ValueError(f"only {len(free)} slots are free")
        new = []
        for slot in free[:count]:
            name = f"cpu-{len(self._plugged)}"
            self.execute("device_add", driver=slot["type"], id=name, **slot["props"])
            self._plugged.append(name)
            new.append(name)
        return new

    def unplug(self, count: int) -> list[str]:
        """See Shim.unplug."""
        gone = []
        for _ in range(count):
            name = self._plugged.pop()
            tid = self._tid(name)
            self.execute("device_del", id=name)
            self.execute("inject-nmi")  # the idle guest ejects when it gets one
            self._wait_gone(name, tid)
            gone.append(name)
        return gone

    def stop(self) -> None:
        """See Shim.stop."""
        self.let_go()
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)

    def kill(self) -> None:
        """See Shim.kill; an object can only free the socket."""
        self.let_go()

    def _tid(self, name: str) -> int:
        for cpu in self.execute("query-cpus-fast"):
            if cpu["qom-path"].endswith(f"/{name}"):
                return int(cpu["thread-id"])
        raise ValueError(f"{name} is not plugged")

    def _wait_gone(self, name: str, tid: int) -> None:
        """Wait until the thread has exited and the id is free again."""
        assert self._process is not None, "not started"
        task = Path(f"/proc/{self._process.pid}/task/{tid}")
        wait_for(lambda: not task.exists(), f"exit of {name}")
        wait_for(lambda: name not in self._peripherals(), f"unplug of {name}")

    def _peripherals(self) -> set[str]:
        listed = self.execute("qom-list", path="/machine/peripheral")
        return {entry["name"] for entry in listed}


def kill_pid(pid: int, timeout_s: float = 5.0) -> None:
    """Kill a process that is not our child and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.002)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"
