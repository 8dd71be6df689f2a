"""Answers hooks (D3, D6).

It records containers, asks QEMU over QMP without ever blocking Kata, and waits for the pins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.base.config.tree import LiveConfig, Qmp
from kata_pin.base.errors import (
    HostError,
    KataPinError,
    ParseError,
    QmpUnavailable,
    RemoteProtocolError,
    StateError,
    reason_of,
)
from kata_pin.base.json_text import load_fields
from kata_pin.base.placement import Report
from kata_pin.base.sandbox import Container, Vmm
from kata_pin.base.values import ContainerKind, RoleSource
from kata_pin.engine.counters import Counters
from kata_pin.engine.sandbox_cache import SandboxCache
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.peers.qemu import QmpAnswers, check_answers
from kata_pin.records.bundles import Intake
from kata_pin.records.containers import Registry
from kata_pin.records.hooks import HookConnection, HookMessage, Spool
from kata_pin.records.pins import Pins
from kata_pin.rights.broker.threads import MAX_REPLY
from kata_pin.rights.calls import DIRECT, Calls
from kata_pin.vmm.state_files import KataPaths

log = logging.getLogger(__name__)


# Asks QEMU over QMP which thread is which vCPU, without ever blocking Kata.
#
# QEMU serves one client per socket: a second one connects, waits without a greeting, and takes the
# slot when the first reconnects. So qmp.sock is asked only when the caller knows that it is free
# (D6: in the window of the announcing hook, or when the shim is proven dead) and no client is
# connected; the greeting must come within 50 ms, all answers within 120 ms, and the socket is
# closed in any case. The extra monitor socket may be asked at any time. Two read-only queries,
# nothing else: the one who talks to QEMU is rights/broker/threads.py.
#
# A session lives as long as one call. What QEMU answers is a hint: peers/qemu.py checks its shape,
# the roles check that the threads are QEMU's own.

GREETING_S: Final = 0.05
SESSION_S: Final = 0.12
MAX_VALUES: Final = 65_536  # most brackets and commas of an answer: 4,096 vCPUs take about 53,000
MAX_SOCKETS: Final = 4 * 1024 * 1024  # longest /proc/net/unix that is read

_CONNECTED: Final = frozenset({"02", "03"})
"""Socket states CONNECTING and CONNECTED of /proc/net/unix (linux/net.h, socket_state)."""


async def query(
    path: str,
    *,
    pid: int = 0,
    greeting_s: float = GREETING_S,
    session_s: float = SESSION_S,
    proc: str = "/proc",
    calls: Calls = DIRECT,
) -> QmpAnswers:
    """Return what QEMU reports of its vCPUs and iothreads.

    A socket that another client holds or waits for is not even connected (is_held; `pid` is the
    VMM's, if known). Raises QmpUnavailable when it is held, closed, too slow, or answers nonsense.
    Cancelled, it is off the socket before the cancellation goes on.
    """
    if is_held(path, pid=pid, proc=proc):
        raise QmpUnavailable(f"{path}: another client holds it")
    try:
        return _parsed(await calls.vcpu_list(path, greeting_s, session_s))
    except TimeoutError as error:
        raise QmpUnavailable(f"{path}: no answer in time; another client may hold it") from error
    except OSError as error:
        raise QmpUnavailable(f"{path}: {error.strerror or reason_of(error)}") from error
    except (RemoteProtocolError, ParseError) as error:
        raise QmpUnavailable(f"{path}: {error}") from error


def _parsed(answers: bytes) -> QmpAnswers:
    """Return what the two answers say; raises ParseError and RemoteProtocolError."""
    lines = [
        load_fields(line, source="QMP", limit=MAX_REPLY, values=MAX_VALUES)
        for line in answers.split(b"\n")
    ]
    if len(lines) != 2:
        raise ParseError("not two answers", source="QMP")
    cpus, iothreads = (fields.get("return") for fields in lines)
    return check_answers(cpus, iothreads)


def is_held(path: str, *, pid: int = 0, proc: str = "/proc") -> bool:
    """Whether some client is connected to a unix socket, or waits for it.

    /proc/net/unix shows the server's end of each connection under the path that the listener is
    bound to, also while it waits in the backlog. It covers one network namespace: ours, and that of
    process `pid` (the VMM) where given; its inode is another one in each. False also means unknown;
    the deadlines of `query` hold.
    """
    tables: dict[int, str] = {}
    for folder in (proc, f"{proc}/{pid}") if pid else (proc,):
        with contextlib.suppress(OSError):
            tables.setdefault(os.stat(f"{folder}/net/unix").st_ino, f"{folder}/net/unix")
    return any(_holds(line, path) for table in tables.values() for line in _lines(table, path))


def _lines(table: str, path: str) -> Iterator[str]:
    """Yield the lines of a table that end with a path; a node has thousands of others."""
    try:
        with open(table, "rb") as file:
            data = file.read(MAX_SOCKETS)
    except OSError:
        return
    ending = os.fsencode(f"{path}\n")
    at = data.find(ending)
    while at >= 0:
        yield os.fsdecode(data[data.rfind(b"\n", 0, at) + 1 : at + len(ending) - 1])
        at = data.find(ending, at + 1)


def _holds(line: str, path: str) -> bool:
    """Read `num: refcount protocol flags type state inode path`."""
    words = line.split(None, 7)
    return len(words) == 8 and words[7] == path and words[5] in _CONNECTED


# Asks QEMU: over Kata's extra monitor (`extra_monitor_socket`), which is free at any time (D6).
#
# Only about threads that KVM and names left unnamed, once for each; those that QEMU does not list
# then, its monitor's own thread among them, are neither vCPUs nor iothreads. The main socket is
# Kata's, except during its first hook.

_UNNAMED: Final = frozenset({RoleSource.ORDER, RoleSource.REST})


@dataclass
class ExtraMonitor:
    """Asks sandboxes' extra monitors; keeps nothing itself."""

    _paths: KataPaths
    _live: LiveConfig
    _calls: Calls

    async def ask(self, sandbox_id: str, cache: SandboxCache) -> bool:
        """Ask about threads that no pass has named yet; return whether QEMU answered."""
        path, settings = self._paths.extra_monitor(sandbox_id), self._live.now.qmp
        if cache.vmm is None or cache.report is None or not settings.enabled:
            return False
        unnamed = frozenset(
            thread.key
            for thread in cache.report.threads
            if thread.key.tgid == cache.vmm.process.pid and thread.role.source in _UNNAMED
        )
        if unnamed <= cache.asked or not exists(path, self._calls):
            return False
        cache.asked = unnamed
        answers = await ask_qemu(sandbox_id, path, cache.vmm.process.pid, settings, self._calls)
        if answers is not None:
            cache.qmp = answers
        return answers is not None


def exists(path: str, calls: Calls) -> bool:
    """Return whether there is a socket to ask."""
    base, name = os.path.split(path)
    try:
        calls.file(base, [name], 0)
    except OSError:
        return False
    return True


async def ask_qemu(
    sandbox_id: str, path: str, pid: int, settings: Qmp, calls: Calls
) -> QmpAnswers | None:
    """Return what QEMU answers over one of its monitors, or None; `pid` is QEMU's."""
    try:
        return await query(
            path,
            pid=pid,
            greeting_s=settings.greeting_ms / 1000,
            session_s=settings.session_ms / 1000,
            calls=calls,
        )
    except QmpUnavailable as error:
        log.info("sandbox %s: QMP not available: %s", sandbox_id, error)
        return None


# `recorded` is sent after the registry's commit, `pinned` after a pass that began later has read
# every affinity back.


@dataclass
class HookService:
    """Takes hook connections and the spool.

    `find_vmm` returns a sandbox's VMM as of now.
    """

    _live: LiveConfig
    _pins: Pins
    _registry: Registry
    _intake: Intake
    _sandboxes: Sandboxes
    _spool: Spool
    _counters: Counters
    _find_vmm: Callable[[str], Awaitable[Vmm | None]]
    _calls: Calls

    async def hook(self, connection: HookConnection) -> None:
        """Serve one hook; without an answer (the registry cannot be written) the hook spools."""
        try:
            await self._serve(connection)
        except (KataPinError, OSError) as error:
            self._counters.failed("hook", error)
            raise
        finally:
            self._counters.hook(connection.message.stamp_ns)

    async def _serve(self, connection: HookConnection) -> None:
        message, came = connection.message, time.monotonic()
        try:
            container = self._take(message)
        except ParseError as error:
            self._counters.failed("hook", error)
            log.warning("hook message of pid %d refused: %s", message.pid, error)
            await connection.refused(str(error))
            return
        if self._registry.problem or not self._registry.keep():
            if not isinstance(container, str):
                self._sandboxes.mark(container.sandbox_id, container.source)
            raise StateError(f"{self._registry.path}: {self._registry.problem}")
        await connection.recorded()
        if isinstance(container, str):
            log.debug("hook message of pid %d: %s", message.pid, container)
            await connection.pinned()
            return
        if self._in_window(connection, container):
            await self._ask_qemu(connection, container)
        ticket = self._sandboxes.mark(container.sandbox_id, container.source, since=came)
        if message.phase.waits_for_pins:
            report = await self._sandboxes.wait_for_pass(container.sandbox_id, ticket)
            await self._answer(connection, container, report)

    def _take(self, message: HookMessage) -> Container | str:
        """Record a message, in memory where the registry turns out not to be writable."""
        try:
            return self._intake.record(message, spooled=False)
        except StateError:
            if not self._registry.problem:
                raise
            return self._intake.record(message, spooled=False)

    def take_spool(self) -> None:
        """Record every spooled message; what cannot be recorded now stays for the next time."""
        try:
            self._take_spool()
        except (KataPinError, OSError) as error:
            self._counters.failed("spool", error)
            log.warning("cannot record spooled messages now: %s", reason_of(error))

    def _take_spool(self) -> None:
        kept = self._registry.keep()
        for message in self._spool.pending():
            try:
                taken = self._intake.record(message, spooled=True)
            except ParseError as error:
                self._spool.reject(message, error)
                continue
            except HostError as error:  # its bundle cannot be read now; others' may be
                self._counters.failed("spool", error)
                log.warning("spooled message %s: %s; retrying", message.spool_name, error)
                continue
            if not isinstance(taken, str):
                self._sandboxes.mark(taken.sandbox_id, taken.source)
            elif kept:
                log.info("spooled message %s dropped: %s", message.spool_name, taken)
            if kept:
                self._spool.done(message)

    async def follow_spool(self) -> None:
        """Record spooled messages whenever one arrives; runs until cancelled."""
        async for _ in self._spool.watch():
            self.take_spool()

    def _in_window(self, connection: HookConnection, container: Container) -> bool:
        """Whether Kata's Go runtime leaves qmp.sock free while this hook runs."""
        return (
            self._live.now.qmp.enabled
            and connection.message.phase.waits_for_pins
            and container.kind is ContainerKind.SANDBOX
            and not connection.gone.is_set()
            and exists(self._qmp_path(container), self._calls)
        )

    async def _ask_qemu(self, connection: HookConnection, container: Container) -> None:
        """Ask for vCPU threads and iothreads; the session ends at once when the hook goes.

        Meanwhile the VMM is found, which this hook of Kata's Go runtime names.
        """
        path, settings = self._qmp_path(container), self._live.now.qmp
        session = asyncio.create_task(
            ask_qemu(container.sandbox_id, path, container.pid_hint, settings, self._calls)
        )
        gone = asyncio.create_task(connection.gone.wait())
        try:
            await asyncio.sleep(0)  # the questions are on their way
            if await self._find_vmm(container.sandbox_id) is None:  # not known whose socket it is
                return
            await asyncio.wait({session, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.cancel()
            gone.cancel()
            answers, _ = await asyncio.gather(session, gone, return_exceptions=True)
        if isinstance(answers, Exception):
            raise answers
        if isinstance(answers, QmpAnswers):
            self._sandboxes.enter(container.sandbox_id).cache.qmp = answers

    def _qmp_path(self, container: Container) -> str:
        paths = self._live.now.paths
        return KataPaths(vc=paths.vc, kata=paths.kata).main_qmp(container.sandbox_id)

    async def _answer(
        self, connection: HookConnection, container: Container, report: Report | None
    ) -> None:
        cache = self._sandboxes.cache(container.sandbox_id)
        if cache is None:  # dropped: it has no VMM, so there is nothing to pin
            await connection.pinned()
        elif report is None:
            await connection.unpinned("the pass over the sandbox failed")
        elif cache.vmm is None:
            await connection.unpinned(cache.problem or "no VMM")
        elif container.sandbox_id in self._pins.released():
            await connection.unpinned("the operator released the sandbox")
        elif not self._live.acts:
            await connection.unpinned("the daemon only observes")
        elif not report.all_placed:
            await connection.unpinned("not every thread is where it should be")
        else:
            await connection.pinned()
