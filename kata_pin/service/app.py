"""The service: everything assembled, one TaskGroup, clean start and stop.

Sockets are bound before anything slow, so that hooks wait in the backlog instead of spooling. After
SIGTERM or SIGINT masks stay (D15): undo is `kata-pin unpin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kata_pin import __version__
from kata_pin.base.config.tree import Config
from kata_pin.base.errors import DaemonError, KataPinError, reason_of
from kata_pin.linux.files import HostRoot
from kata_pin.records.history import STARTED, about
from kata_pin.service.assembly import Assembly
from kata_pin.service.options import preload
from kata_pin.service.privileges import Broker, brokered, give_up
from kata_pin.service.process import Background, LoopErrors, Notifier, set_up
from kata_pin.service.runtime_dir import held_registry, only_one

log = logging.getLogger(__name__)


@dataclass
class Daemon:
    """The service of one node.

    `reread` returns the configuration as it is now; raises ConfigError when it is wrong.
    """

    _config: Config
    _reread: Callable[[], Config]
    _notifier: Notifier
    _broker: Broker
    _root: HostRoot
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM and SIGINT; then `run` ends."""

    async def run(self) -> None:
        """Serve until it is stopping.

        Raises DaemonError when another daemon serves the runtime directory, StateError or OSError
        when it cannot be used.
        """
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        with held_registry(self._config) as registry:
            async with asyncio.TaskGroup() as tasks:
                background = Background(tasks)
                background.start(self._broker.watch())
                parts = Assembly(
                    self._config,
                    registry,
                    background,
                    self._reread,
                    self._notifier,
                    root=self._root,
                    broker=self._broker.process.pid,
                )
                await self.serve(parts, background)

    async def serve(self, parts: Assembly, background: Background) -> None:
        """Run what was assembled until the daemon is stopped."""
        folder = self._config.runtime_dir
        with _signals(self.stopping, parts.reload), contextlib.closing(parts.hooks):
            parts.hooks.bind()
            async with contextlib.AsyncExitStack() as listening:
                for server in parts.controls:
                    await listening.enter_async_context(server.serving())
                await parts.take_in()
                for work in parts.works():
                    background.start(work)
                log.info("kata-pin %s serves %s", __version__, folder, extra=about(STARTED))
                await self.stopping.wait()
                self._notifier.send("STOPPING=1")
                background.end()


@contextlib.contextmanager
def _signals(stopping: asyncio.Event, reload: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def calm_collector() -> None:
    """Make Python's collector of reference cycles rare: a full one holds up a pass by 15 ms.

    What is loaded by now is never garbage, and passes make none with cycles; each connection leaves
    one (asyncio's transport), which only a look at young objects frees.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 100, 100)


def serve(config: Config, reread: Callable[[], Config], *, debug: bool = False) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT; raises KataPinError."""
    set_up("debug" if debug else config.log_level.value, os.environ)
    try:
        preload(config)
        with only_one(config), brokered(config) as broker:
            give_up(config)
            root = HostRoot(debugfs=config.paths.debugfs, calls=broker.calls)
            daemon = Daemon(config, reread, Notifier(os.environ), broker, root)
            calm_collector()
            asyncio.run(daemon.run())
    except (KataPinError, OSError, ExceptionGroup) as error:
        cause = _cause(error)
        if isinstance(cause, OSError):
            what = f"cannot serve {config.runtime_dir}: {reason_of(cause)}"
            raise DaemonError(what) from error
        raise cause from error


def _cause(error: Exception) -> Exception:
    """Return the first error of a TaskGroup's, which may be a group's again."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
