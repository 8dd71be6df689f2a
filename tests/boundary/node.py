"""The whole daemon in this process, over a host made of files: the one module that imports it.

    async with Node(tmp_path) as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert vm.masks["v1"] == "5"

A test has sockets and files as its handles, and a clock that it moves. What needs rights is done by
`Kernel`: affinities are numbers in the tree, process events come when a test sends them.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self, cast

import pytest

import kata_pin.hook
from kata_pin.base.errors import HostError
from kata_pin.follow import files
from kata_pin.linux.files import HostRoot
from kata_pin.rights.broker.files import File
from kata_pin.rights.broker.pages import PagesMoved, PageWindow
from kata_pin.rights.broker.protocol import AffinityChange, Changed
from kata_pin.rights.broker.tunables import TunableWrite, TunableWritten
from kata_pin.rights.calls import Calls
from kata_pin.service import configuration as config_file
from kata_pin.service.app import Daemon
from kata_pin.service.privileges import Broker
from kata_pin.service.process import Notifier
from tests.boundary.host import Host, Json, Vm
from tests.support.fakeconnector import FakeConnector
from tests.support.waiting import SCALE

_monotonic = time.monotonic

_LOOK_S: Final = 0.002

WRITES: Final = ("INSERT", "UPDATE", "DELETE")


class Clock:
    """CLOCK_MONOTONIC of this process, as far as time.monotonic() tells; `move` makes it later."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        patch.setattr(time, "monotonic", lambda: _monotonic() + self.ahead_s)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time pass, so that nothing that waits becomes due; only sleep(0) returns."""
        with pytest.MonkeyPatch.context() as patch:
            now = time.monotonic()
            patch.setattr(time, "monotonic", lambda: now)
            yield

    async def turns(self, holds: Callable[[], object]) -> None:
        """While time is stopped, let all others have their turns until something holds.

        What comes from outside, as a file's event does, takes its time on a busy machine.
        """
        limit = _monotonic() + 10 * SCALE
        while not holds():
            assert _monotonic() < limit, "it does not hold while no time passes"
            await asyncio.sleep(0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the block take no time, however long it blocks the event loop."""
        began = _monotonic()
        yield
        self.ahead_s -= _monotonic() - began

    async def move(self, seconds: float) -> None:
        """Let time pass, and what became due by it run."""
        self.ahead_s += seconds
        for _ in range(20):
            await asyncio.sleep(0)


class Kernel(Calls):
    """What the broker would ask the kernel for, over a host of files.

    `refuse` is the error by tid, `narrow` all that a tid ever gets; `tried` and
    `moves` are the threads that were to be set, and were, in order; `classes` their scheduling.
    `monitors` are QEMU's sockets that are being asked: none answers. `unreadable` are errors by
    the end of a file's path, `locked` processes whose files of /proc do not answer. A uevent is put
    into `cpu_events`; None: the kernel sends none. Values of /proc/irq and /sys are
    written by `tunables`, pages moved by `memory`, groups of resctrl made by `caches`.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.connector = FakeConnector()
        self.refuse: dict[int, int] = {}
        self.narrow: dict[int, set[int]] = {}
        self.tried: list[int] = []
        self.moves: list[int] = []
        self.before_set: Callable[[int], None] = lambda _: None
        self.classes: dict[int, tuple[int, int]] = {}
        self.windows: list[PageWindow] = []
        self.monitors: list[str] = []
        self.tunables = Calls()
        self.memory: Calls | None = None
        self.unreadable: dict[str, int] = {}
        self.locked: set[int] = set()
        self.has_perf = False
        self.caches = Calls()
        self.opened = 0
        self.cpu_events: asyncio.Queue[None] | None = asyncio.Queue()

    def get_affinity(self, tid: int) -> set[int]:
        """Return it; ESRCH where there is no such thread."""
        try:
            return set(self.host.affinities[tid])
        except KeyError:
            raise ProcessLookupError(errno.ESRCH, "no such thread") from None

    def set_affinity(self, tid: int, cpus: Iterable[int]) -> None:
        """Keep what the cpuset leaves of it; EINVAL when that is nothing."""
        self.get_affinity(tid)
        self.tried.append(tid)
        self.before_set(tid)
        if tid in self.refuse:
            raise OSError(self.refuse[tid], os.strerror(self.refuse[tid]))
        left = set(cpus) & self.host.allowed(tid) & self.host.online
        left &= self.narrow.get(tid, left)
        if not left:
            raise OSError(errno.EINVAL, "no CPU left")
        self.moves.append(tid)
        self.host.affinities[tid] = left

    async def vcpu_list(self, path: str, greeting_s: float, session_s: float) -> bytes:
        """Keep the session open until it is cancelled."""
        self.monitors.append(path)
        try:
            await _forever()
        finally:
            self.monitors.remove(path)
        return b""

    def file(self, base: str, parts: Sequence[str], limit: int) -> File:
        """Open a file, unless it cannot be read."""
        path = "/".join((base, *parts))
        for end, number in self.unreadable.items():
            if path.endswith(end):
                raise OSError(number, os.strerror(number), path)
        return super().file(base, parts, limit)

    async def uevents(self) -> AsyncIterator[None]:
        """Yield when CPUs went on- or offline."""
        if self.cpu_events is None:
            raise HostError("receive", "the kernel's uevents", errno.EPERM)
        while True:
            await self.cpu_events.get()
            yield None

    def process_events(self, token: int, *, execs: bool) -> socket.socket:
        """Return the listener's end of the connector."""
        return self.connector.connect(token, execs=execs)

    def switches(self, cpu: int) -> int:
        """Open an event that records nothing, if `has_perf`."""
        self.opened += 1
        if self.has_perf:
            return os.open("/dev/null", os.O_RDONLY)
        raise OSError(errno.EACCES, "no perf events")

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """Note them, and have them shown; `refuse` holds here too."""
        done = [Changed(self.refuse.get(change.tid, 0)) for change in changes]
        for change, each in zip(changes, done, strict=True):
            if not each.errno:
                self.classes[change.tid] = policy, priority
                self.host.set_class(change.tid, policy, priority)
        return done

    def write_tunables(self, writes: Sequence[TunableWrite], root: str) -> list[TunableWritten]:
        """Write them."""
        return self.tunables.write_tunables(writes, root)

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """Ask it."""
        return self.tunables.ask_irqbalance(pid, banned)

    def make_group(self, class_name: str, name: str) -> None:
        """Make a group of `caches`."""
        self.caches.make_group(class_name, name)

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        """Have threads join it."""
        return self.caches.join_group(class_name, name, threads)

    def remove_group(self, class_name: str, name: str) -> None:
        """Remove it."""
        self.caches.remove_group(class_name, name)

    async def move_pages(self, window: PageWindow, deadline_s: float) -> PagesMoved:
        """Have `memory` move them; refuse where there is none."""
        self.windows.append(window)
        if self.memory is None:
            raise OSError(errno.EPERM, "no pages")
        return await self.memory.move_pages(window, deadline_s)

    async def read_slow(
        self, requests: Sequence[tuple[int, str, int]], deadline_s: float
    ) -> Mapping[tuple[int, str], bytes | OSError]:
        """Return the files of the tree, and those of `memory`."""
        if self.memory is not None and {file for _, file, _ in requests} <= {"maps", "numa_maps"}:
            return await self.memory.read_slow(requests, deadline_s)
        return {(pid, file): self._content(pid, file) for pid, file, _ in requests}

    def _content(self, pid: int, file: str) -> bytes | OSError:
        path = self.host.folder / "proc" / str(pid) / file
        if pid in self.locked:
            return TimeoutError()
        try:
            if file == "exe":
                return b"0 0 0 100755\n" + os.fsencode(os.readlink(path))
            return path.read_bytes()
        except OSError as error:
            return error


class Node:
    """One node and its daemon, which runs from `start` to `stop`, or within `async with`."""

    def __init__(self, folder: Path, *, sysfs: str | int = 16, **settings: Any) -> None:
        self.folder = folder
        self.host = Host(folder / "h", sysfs)
        self.kernel = Kernel(self.host)
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock(self.patch)
        self.patch.setattr(files, "cpu_changes", self.kernel.uevents)
        self.runtime_dir = folder / "kp"
        self.config = folder / "config.yaml"
        self.vms: dict[str, Vm] = {}
        self.configure(**settings)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notified.bind(str(folder / "notify"))
        self._daemon: Daemon | None = None
        self._running: asyncio.Task[None] | None = None

    def configure(self, **settings: Any) -> None:
        """Write the configuration: what tests need, and what differs from it."""
        host = self.host
        paths = {
            "cdi": str(host.folder / "cdi"),
            "vc": str(host.vc),
            "kata": str(host.folder / "run/kata"),
            "bundle_roots": [str(host.bundles)],
            "debugfs": "/nonexistent",
            "kubelet_state": str(host.kubelet_state),
            "kata_configs": [],
        }
        known = {
            "version": 1,
            "runtime_dir": str(self.runtime_dir),
            "nri": {"enabled": "no"},
            "audit": {"affinity_s": 3600, "deep_s": 86400},
            "paths": paths,
        }
        self.settings: Json = known | settings
        self.config.write_text(json.dumps(self.settings))

    def change(self, **settings: Any) -> None:
        """Write other values of these settings; a running daemon has them after a reload."""
        self.settings |= settings
        self.config.write_text(json.dumps(self.settings))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.stop()
        finally:
            self.kernel.connector.close()
            self._notified.close()
            self.patch.undo()

    async def start(self) -> None:
        """Start the daemon; return when it serves."""
        config = config_file.load(str(self.config))
        process = SimpleNamespace(pid=os.getpid())
        broker = SimpleNamespace(process=process, calls=self.kernel, watch=_forever)
        root = HostRoot(str(self.host.folder), config.paths.debugfs, self.kernel)
        self._daemon = Daemon(
            config,
            lambda: config_file.load(str(self.config)),
            Notifier({"NOTIFY_SOCKET": str(self.folder / "notify")}),
            cast("Broker", broker),
            root,
        )
        self._running = asyncio.create_task(self._daemon.run())
        await self.until(self._serves, "the daemon serves")

    async def stop(self) -> None:
        """Stop it; raises what ended it before."""
        if self._running is None or self._daemon is None:
            return
        running, self._running = self._running, None
        self._daemon.stopping.set()
        await running

    async def kill(self) -> None:
        """End it as kill -9 does, as far as its own code can tell: nothing is tidied up."""
        assert self._running is not None
        running, self._running = self._running, None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def _serves(self) -> bool:
        assert self._running is not None
        if self._running.done():
            self._running.result()
        with suppress(BlockingIOError):
            return self._notified.recv(4096).startswith(b"READY=1")
        return False

    async def until(self, holds: Callable[[], object], what: str, within_s: float = 5.0) -> Any:
        """Wait until something holds and return it; fail with `what` if it does not in time.

        Time counts by how often this task had its turn: a busy machine makes a test no shorter.
        """
        for _ in range(round(within_s * SCALE / _LOOK_S)):
            if found := holds():
                return found
            await asyncio.sleep(_LOOK_S)
        raise AssertionError(f"not within {within_s} s: {what}")

    @contextmanager
    def registry_refuses(self, *tables: str) -> Iterator[None]:
        """Have every row be refused that is written to these tables of the registry, or to any."""
        every = self.rows("sqlite_master", "name", "type = 'table'")
        with self._registry() as file:
            names = [
                (f"no_{what}_{name}", what, name)
                for (name,) in every
                for what in WRITES
                if name in tables or not tables
            ]
            for trigger, what, name in names:
                refuse = f"BEFORE {what} ON {name} BEGIN SELECT RAISE(ABORT, 'full'); END"
                file.execute(f"CREATE TRIGGER {trigger} {refuse}")
            try:
                yield
            finally:
                for trigger, _, _ in names:
                    file.execute(f"DROP TRIGGER {trigger}")

    def rows(self, table: str, columns: str = "*", where: str = "true") -> list[tuple[Any, ...]]:
        """Return rows of the registry's file."""
        with self._registry() as file:
            return file.execute(f"SELECT {columns} FROM {table} WHERE {where}").fetchall()

    def _registry(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self.runtime_dir / "registry.db", isolation_level=None))

    async def pause(self) -> None:
        """Wait a little, for a test that asks until something holds."""
        await asyncio.sleep(0.005)

    # ---- asking ---------------------------------------------------------------------------

    async def ask(self, verb: str, **arguments: object) -> Json:
        """Return the document of a verb of the control socket; fails if it is refused."""
        reply = await self.request(verb, **arguments)
        assert reply["ok"], reply
        document: Json = reply["document"]
        return document

    async def request(self, verb: str, **arguments: object) -> Json:
        """Return the reply to a verb."""
        reader, writer = await asyncio.open_unix_connection(
            str(self.runtime_dir / "control.sock"), limit=1 << 26
        )
        try:
            writer.write(json.dumps({"version": 1, "verb": verb} | arguments).encode() + b"\n")
            reply: Json = json.loads(await reader.readline())
            return reply
        finally:
            writer.close()
            await writer.wait_closed()

    async def shown(self, vm: Vm) -> Json:
        """Return what the state document shows of a sandbox, nothing where it is unknown."""
        state = await self.ask("state")
        return next((one for one in state["sandboxes"] if one["id"] == vm.id), {})

    async def placed(self, vm: Vm, **masks: str) -> None:
        """Wait until threads have these affinities."""
        try:
            await self.until(lambda: vm.masks | masks == vm.masks, f"{vm.id} on {masks}")
        except AssertionError as error:
            reasons = {one["label"]: one["reason"] for one in (await self.shown(vm))["threads"]}
            error.add_note(f"its threads are on {vm.masks}: {reasons}")
            raise

    # ---- pods -----------------------------------------------------------------------------

    def vm(self, name: str, **options: Any) -> Vm:
        """Start a sandbox's VM."""
        vm = self.vms[name] = Vm(self.host, name, **options)
        return vm

    async def create(self, vm: Vm, name: str, cpus: str = "", **options: Any) -> str:
        """Create a container: its bundle, Kata's file, its hook; return what the hook printed."""
        vm.bundle(name, cpus, **options)
        vm.persist(**{name: cpus})
        return await self.hook("createRuntime", name, vm.pid)

    async def stopped(self, vm: Vm, name: str) -> str:
        """Delete a container: Kata's file, then its hook."""
        vm.forget(name)
        return await self.hook("poststop", name, vm.shim, state_id=vm.id)

    async def hook(self, phase: str, name: str, pid: int, *, state_id: str = "") -> str:
        """Run the hook program; return what it wrote to stderr: nothing if it was answered."""
        bundle = str(self.host.bundles / name)
        state = {"ociVersion": "", "id": state_id or name, "pid": pid, "bundle": bundle}
        budgets = [f"--{kind}-ms={5000 * SCALE:.0f}" for kind in ("record", "pin")]
        hook = await asyncio.create_subprocess_exec(
            *(sys.executable, "-IS", kata_pin.hook.__file__, phase, *budgets),
            f"--runtime-dir={self.runtime_dir}",
            stdin=PIPE,
            stderr=PIPE,
            env={},
        )
        _, printed = await hook.communicate(json.dumps(state).encode())
        assert hook.returncode == 0
        return printed.decode()


async def _forever() -> None:
    await asyncio.Event().wait()
