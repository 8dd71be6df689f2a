"""Answers hooks: records, opens QMP's window, waits for the pins (D3, D6).

`recorded` is sent after the registry's commit, `pinned` after a pass that began later has read
every affinity back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kata_pin.calls import Calls
from kata_pin.daemon.intake.qmp import ask_qemu, exists
from kata_pin.daemon.intake.records import Intake
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import HostError, KataPinError, ParseError, reason_of
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Container, ContainerKind, Vmm
from kata_pin.sources.hooks import HookConnection
from kata_pin.sources.spool import Spool
from kata_pin.vmm.state_files import KataPaths
from kata_pin.wire.qemu.qmp import QmpAnswers

log = logging.getLogger(__name__)


@dataclass
class HookService:
    """Takes hook connections and the spool.

    `find_vmm` returns a sandbox's VMM as of now.
    """

    _live: LiveConfig
    _pins: Pins
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
        message = connection.message
        try:
            container = self._intake.take(message, spooled=False)
        except ParseError as error:
            self._counters.failed("hook", error)
            log.warning("hook message of pid %d refused: %s", message.pid, error)
            await connection.refused(str(error))
            return
        await connection.recorded()
        if isinstance(container, str):
            log.debug("hook message of pid %d: %s", message.pid, container)
            await connection.pinned()
            return
        if self._in_window(connection, container):
            await self._ask_qemu(connection, container)
        ticket = self._sandboxes.mark(container.sandbox_id, container.source)
        if message.phase.waits_for_pins:
            report = await self._sandboxes.settled(container.sandbox_id, ticket)
            await self._answer(connection, container, report)

    def take_spool(self) -> None:
        """Record every spooled message; what cannot be recorded now stays for the next time."""
        try:
            self._take_spool()
        except (KataPinError, OSError) as error:
            self._counters.failed("spool", error)
            log.warning("cannot record spooled messages now: %s", reason_of(error))

    def _take_spool(self) -> None:
        for message in self._spool.pending():
            try:
                taken = self._intake.take(message, spooled=True)
            except ParseError as error:
                self._spool.reject(message, error)
                continue
            except HostError as error:  # its bundle cannot be read now; others' may be
                self._counters.failed("spool", error)
                log.warning("spooled message %s: %s; retrying", message.spool_name, error)
                continue
            if isinstance(taken, str):
                log.info("spooled message %s dropped: %s", message.spool_name, taken)
            else:
                self._sandboxes.mark(taken.sandbox_id, taken.source)
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
        """Ask for vCPU threads and iothreads; the session ends at once when the hook goes."""
        vmm = await self._find_vmm(container.sandbox_id)
        if vmm is None:  # not known whose socket it is
            return
        cache = self._sandboxes.enter(container.sandbox_id).cache
        path, settings = self._qmp_path(container), self._live.now.qmp
        session = asyncio.create_task(
            ask_qemu(container.sandbox_id, path, vmm.process.pid, settings, self._calls)
        )
        gone = asyncio.create_task(connection.gone.wait())
        try:
            await asyncio.wait({session, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.cancel()
            gone.cancel()
            answers, _ = await asyncio.gather(session, gone, return_exceptions=True)
        if isinstance(answers, Exception):
            raise answers
        if isinstance(answers, QmpAnswers):
            cache.qmp = answers

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
        elif not report.settled:
            await connection.unpinned("not every thread is where it should be")
        else:
            await connection.pinned()
