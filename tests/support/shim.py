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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.support.monitor import Monitor
from tests.support.waiting import SCALE, wait_for

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
    """The stand-in as an object: QEMU is a child of the calling process.

    `timeout_s` bounds each answer of QEMU and each unplug. `eject_by_nmi`: the idle guest ejects a
    vCPU when it gets an NMI; one with an operating system does so without. `note` is told QEMU's
    pid as soon as there is one, before it answers.
    """

    def __init__(
        self,
        timeout_s: float = 10.0 * SCALE,
        *,
        eject_by_nmi: bool = True,
        note: Callable[[int], None] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._note = note
        self._eject_by_nmi = eject_by_nmi
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._qmp_path = ""
        self._plugged: list[str] = []

    @property
    def pid(self) -> int:
        """The calling process."""
        return os.getpid()

    @property
    def ended(self) -> int | None:
        """The exit status of a QEMU that has ended, negative for a signal."""
        return None if self._process is None else self._process.poll()

    @property
    def plugged(self) -> tuple[str, ...]:
        """The ids of the hotplugged vCPUs, in the order in which they were plugged."""
        return tuple(self._plugged)

    def start(
        self, argv: list[str], qmp_path: str, log_path: str, pass_fds: Sequence[int] = ()
    ) -> int:
        """See Shim.start; QEMU gets the descriptors `pass_fds` too, under the same numbers."""
        self._qmp_path = qmp_path
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(qmp_path)
            listener.listen(1)
            log = stack.enter_context(Path(log_path).open("ab"))
            number = str(listener.fileno())
            self._process = subprocess.Popen(
                [part.replace(QMP_FD, number) for part in argv],
                pass_fds=(listener.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            if self._note is not None:
                self._note(self._process.pid)
            self.hold()
        except BaseException as error:
            self.stop()
            said = Path(log_path).read_text(errors="replace").strip()
            raise RuntimeError(f"QEMU did not start: {error}: {said[-400:]}") from error
        return self._process.pid

    def hold(self) -> None:
        """See Shim.hold."""
        if self._monitor is None:
            self._monitor = Monitor(self._qmp_path, self._timeout_s)

    def let_go(self) -> None:
        """See Shim.let_go."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def execute(self, command: str, **arguments: Any) -> Any:
        """See Shim.execute."""
        if self._monitor is not None:
            return self._monitor.execute(command, **arguments)
        monitor = Monitor(self._qmp_path, self._timeout_s)
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
            name = self._new_id(slot["props"])
            self.execute("device_add", driver=slot["type"], id=name, **slot["props"])
            self._plugged.append(name)
            new.append(name)
        return new

    def unplug(self, count: int) -> list[str]:
        """See Shim.unplug."""
        gone = []
        for _ in range(count):
            name = self._next_to_go()
            tid = self._tid(name)
            self.execute("device_del", id=name)
            if self._eject_by_nmi:
                self.execute("inject-nmi")
            self._wait_gone(name, tid)
            self._plugged.remove(name)
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

    def _new_id(self, props: Mapping[str, int]) -> str:
        """Return the id of the next vCPU, which goes to the slot `props`: the Go runtime counts."""
        del props
        return f"cpu-{len(self._plugged)}"

    def _next_to_go(self) -> str:
        """Return the vCPU to unplug: the Go runtime takes the one plugged last."""
        return self._plugged[-1]

    def _tid(self, name: str) -> int:
        for cpu in self.execute("query-cpus-fast"):
            if cpu["qom-path"].endswith(f"/{name}"):
                return int(cpu["thread-id"])
        raise ValueError(f"{name} is not plugged")

    def _wait_gone(self, name: str, tid: int) -> None:
        """Wait until the thread has exited and the id is free again."""
        assert self._process is not None, "not started"
        task = Path(f"/proc/{self._process.pid}/task/{tid}")
        limit = self._timeout_s / SCALE  # wait_for stretches by itself
        wait_for(lambda: not task.exists(), f"exit of {name}", limit)
        wait_for(lambda: name not in self._peripherals(), f"unplug of {name}", limit)

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
