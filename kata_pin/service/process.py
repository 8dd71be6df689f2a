"""The daemon as a process.

It logs, reports to systemd, runs tasks and reports their errors, and keeps off exclusive CPUs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from errno import ESRCH, ESTALE
from typing import Final

from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.errors import HostError, TaskGone, is_transient, reason_of
from kata_pin.base.json_text import one_line
from kata_pin.base.placement import RELEASED, PassOutcome
from kata_pin.engine.counters import Observer
from kata_pin.engine.node import NodeWatch
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.hook import FREE_CPUS
from kata_pin.linux.files import HOST, read_text
from kata_pin.linux.tasks import list_tids, starttime
from kata_pin.records.history import PRIORITIES, SOCKET, JournalHandler, reads_stderr
from kata_pin.rights.broker.protocol import AffinityChange
from kata_pin.rights.calls import Calls

log = logging.getLogger(__name__)


@dataclass
class Background:
    """Starts tasks in a TaskGroup; `end` cancels those that still run."""

    _tasks: asyncio.TaskGroup
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: bool = False

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine; after `end` it is closed at once, since nothing would cancel it."""
        if self._ended:
            work.close()
            return
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def end(self) -> None:
        """Cancel what runs."""
        self._ended = True
        for task in list(self._running):
            task.cancel()


# What the event loop itself reports: one line each, without a traceback.
#
# asyncio stops accepting on a socket for a second when the process has no descriptor or memory left
# (the module selector_events), and reports that each time.

REPEAT_S: Final = 60.0
"""Least time between two lines about one socket."""


class LoopErrors:
    """An exception handler of an event loop (loop.set_exception_handler)."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
        """Log what asyncio reports."""
        error, listener = context.get("exception"), context.get("socket")
        reason = reason_of(error) if isinstance(error, BaseException) else ""
        if isinstance(error, OSError) and is_transient(error) and listener is not None:
            place = _address(listener)
            if time.monotonic() - self._logged.get(place, -REPEAT_S) >= REPEAT_S:
                self._logged[place] = time.monotonic()
                log.warning("cannot accept connections on %s: %s; retrying", place, reason)
            return
        log.error("unexpected: %s: %s", context.get("message", "event loop"), reason)
        if isinstance(error, BaseException):
            log.debug("event loop", exc_info=error)


def _address(listener: object) -> str:
    """Return where a socket listens, for people."""
    name = getattr(listener, "getsockname", str)()
    if isinstance(name, str):  # bound under another name first (unix_socket.listen)
        return name.removesuffix(".new")
    return ":".join(map(str, name[:2]))


class OneLineFormatter(logging.Formatter):
    """Makes one line of each message: names in it may come from anybody, with any characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the record's line; a traceback has its own."""
        return one_line(super().formatMessage(record))


class JournalFormatter(OneLineFormatter):
    """Puts sd-daemon(3)'s priority before each line, also of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def set_up(level: str, environ: Mapping[str, str], *, journal: str = SOCKET) -> None:
    """Log from `level` on, to the journal's socket where the journal reads standard error."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if reads_stderr(environ):
        handler.setFormatter(JournalFormatter("%(message)s"))
        if os.path.exists(journal):
            handler = JournalHandler(journal, fallback=handler)
            handler.setFormatter(OneLineFormatter("%(message)s"))
    else:
        handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log from another level on."""
    logging.getLogger("kata_pin").setLevel(level.upper())


# sd_notify: reports to systemd that the service is ready, alive, reloading or stopping.
#
# Protocol: sd_notify(3). Without NOTIFY_SOCKET (not under systemd) every call does nothing.


class Notifier:
    """Sends datagrams to the service manager; never fails the caller."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_seconds(environ)

    def send(self, *assignments: str) -> None:
        """Send variables, each as NAME=value."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(assignments).encode(), address)
        except OSError:
            return  # a manager that does not listen must not end the service


@dataclass
class ServiceStatus:
    """What systemd shows of the daemon: its state, and one line about its sandboxes."""

    _notifier: Notifier
    _sandboxes: Sandboxes
    _live: LiveConfig

    def ready(self) -> None:
        """Report that start-up, or a reload, is done."""
        self._notifier.send("READY=1", self._status)

    def reloading(self) -> None:
        """Report that a reload began; `ready` ends it (Type=notify-reload)."""
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    async def run(self) -> None:
        """Report that start-up is done, then feed the watchdog while the event loop runs."""
        self.ready()
        period = self._notifier.watchdog_s
        while period is not None:
            await asyncio.sleep(period)
            self._notifier.send("WATCHDOG=1", self._status)

    @property
    def _status(self) -> str:
        return f"STATUS={len(self._sandboxes.ids)} sandboxes, mode {self._live.now.mode.value}"


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return half the watchdog's period, when it is meant for this process."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000 or None


# Keeps kata-pin's own processes off exclusive pCPUs: the daemon, its broker, hooks and commands.
#
# The first two are moved here. The others find in a file which pCPUs are left, as a hexadecimal
# mask, and move themselves (hook.py).

_PROC: Final = "/proc"


class OwnCpus(Observer):
    """An observer of passes; `look` finds what no pass shows (grants, the kubelet's checkpoint)."""

    def __init__(
        self,
        runtime_dir: str,
        node: NodeWatch,
        calls: Calls,
        broker: int,
        granted: Callable[[], CpuSet],
    ) -> None:
        """`broker` is the broker's pid; `granted` returns what the allocator gave exclusively."""
        self._path = os.path.join(runtime_dir, FREE_CPUS)
        self._node = node
        self._calls = calls
        self._broker = broker
        self._granted = granted
        self._exclusive: dict[str, CpuSet] = {}
        self._first = CpuSet(os.sched_getaffinity(0))
        self._confined = not node.last.topology.online <= self._first
        self._kept = EMPTY
        self._problem = ""

    def passed(self, outcome: PassOutcome) -> None:
        """Keep off what a sandbox has now."""
        decided = outcome.report.placement
        mine = EMPTY if decided is None or outcome.state == RELEASED else decided.mask.exclusive
        if self._exclusive.get(outcome.sandbox_id) != mine:
            self._exclusive[outcome.sandbox_id] = mine
            self.look()

    def ended(self, outcome: PassOutcome) -> None:
        """Use again what a sandbox had."""
        if self._exclusive.pop(outcome.sandbox_id, EMPTY):
            self.look()

    def look(self) -> None:
        """Move to the pCPUs that are nobody's alone; where there are none, to all of ours."""
        node = self._node.last
        online = node.topology.online
        ours = self._first & online if self._confined else online
        taken = union((*self._exclusive.values(), self._granted(), node.assigned))
        free = ours - taken or ours
        if free == self._kept:
            return
        try:
            self._move(free)
            self._publish(free)
            self._kept, self._problem = free, ""
        except (OSError, HostError) as error:  # the next look tries again
            if reason_of(error) != self._problem:
                log.warning("kata-pin itself may run on exclusive pCPUs: %s", reason_of(error))
            self._problem = reason_of(error)

    def _move(self, cpus: CpuSet) -> None:
        for tid in list_tids(HOST, os.getpid()):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(tid, cpus)
        changes = []
        for pid in (self._broker, *_children(self._broker)):
            with suppress(TaskGone):
                changes.append(
                    AffinityChange(pid, pid, starttime(HOST, pid, pid), 0, frozenset(cpus))
                )
        for changed in self._calls.set_affinities(changes, _PROC):
            if changed.errno not in {0, ESRCH, ESTALE}:
                raise OSError(changed.errno, os.strerror(changed.errno))

    def _publish(self, cpus: CpuSet) -> None:
        fresh = f"{self._path}.new"
        with suppress(FileNotFoundError):  # what a killed daemon left may be another user's
            os.unlink(fresh)
        with open(fresh, "x", encoding="ascii") as file:
            file.write(f"{cpus.bits:x}\n")
        os.rename(fresh, self._path)


def _children(pid: int) -> Iterator[int]:
    """Yield the children of a process, none without CONFIG_PROC_CHILDREN."""
    with suppress(OSError):
        yield from map(int, read_text(HOST.proc(pid, "task", pid, "children")).split())
