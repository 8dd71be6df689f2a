"""The service: everything composed, one TaskGroup, clean start and stop.

Start: sockets are bound before anything slow, so that hooks wait in the backlog instead of
spooling; then the registry's sandboxes and the spool are taken in. Stop (SIGTERM, SIGINT): sockets
are closed, supervisors are cancelled, masks stay (DESIGN D15): undo is `kata-pin unpin`.
SIGHUP reads the configuration again; one that is wrong is reported and the old one stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import logging
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Final

from kata_pin import __version__
from kata_pin.config.tree import Config, NewThreads
from kata_pin.daemon.audit import Auditor
from kata_pin.daemon.compose import Parts, compose
from kata_pin.daemon.control import ControlServer
from kata_pin.daemon.intake import Intake
from kata_pin.daemon.notify import Notifier
from kata_pin.daemon.sandboxes import Sandboxes
from kata_pin.daemon.view import state_document
from kata_pin.errors import ConfigError, DaemonError, HostError, ParseError, StateError
from kata_pin.sources.hooks import HookConnection, HookServer
from kata_pin.sources.procevents import Overrun, ProcEvents, ProcessBorn, TaskExit, ThreadBorn
from kata_pin.sources.spool import Spool

log = logging.getLogger(__name__)

EVENTS_RETRY_S: Final = 30.0

class Daemon:
    """The service of one node; `run` returns after SIGTERM or SIGINT."""

    def __init__(self, config: Config, *, reread: Callable[[], Config], notifier: Notifier) -> None:
        """`reread` gives the configuration anew on SIGHUP; raises ConfigError when it is wrong."""
        self.config = config
        self._reread = reread
        self._notifier = notifier
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._acting = True

    async def run(self) -> None:
        """Serve until told to stop.

        Raises DaemonError when another daemon has the runtime directory, StateError or OSError
        when it cannot be used.
        """
        with _locked(self.config.runtime_dir), contextlib.ExitStack() as closing:
            registry = Registry(self._path("registry.db"), boot_id=boot_id())
            closing.callback(registry.close)
            self._registry = registry
            self._parts = compose(self.config, registry)
            self._intake = Intake(registry, BundleReader(self.config.paths.bundle_roots))
            self._spool = Spool(self._path("spool"))
            self._spool.prepare()
            hooks = HookServer(self._path("hook.sock"), self._hook)
            hooks.bind()
            closing.callback(hooks.close)
            await self._serve(hooks)

    async def _serve(self, hooks: HookServer) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            async with asyncio.TaskGroup() as tasks, self._control():
                self._adopt_registry(tasks)
                running = [
                    tasks.create_task(one)
                    for one in (
                        hooks.serve(),
                        self._follow_spool(),
                        self._follow_events(),
                        self._audit(),
                        self._feed_watchdog(),
                    )
                ]
                self._notifier.ready(self._status())
                log.info("kata-pin %s serves %s", __version__, self.config.runtime_dir)
                await self._stop.wait()
                self._notifier.stopping()
                self._sandboxes.stop()
                for task in running:
                    task.cancel()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
