"""The daemon under measurement: as a process of its own, or inside this one.

ServiceProcess is `kata-pin run` as a user starts it. LocalService is the same Daemon object in this
process's event loop, so that its parts (hook service, auditor, sandboxes) can be timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from pathlib import Path

from kata_pin.base.config.tree import Config
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.tasks import list_tids
from kata_pin.service.app import Daemon, calm_collector
from kata_pin.service.assembly import Assembly
from kata_pin.service.privileges import Broker, brokered
from kata_pin.service.process import Background, Notifier
from kata_pin.vmm.role_cache import YOUNG_S
from tests.bench.figures import BenchError
from tests.bench.node import BenchNode
from tests.support.waiting import wait_for

KATA_PIN = (str(Path(sys.executable).with_name("kata-pin")),)
"""The program as it is installed."""


class ServiceProcess:
    """`kata-pin run`; `log` is what it said."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self._process = process
        self._log_file = log_file

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything it logged so far."""
        return self._log_file.read_text(errors="replace")

    def cpu_s(self) -> float:
        """Return the CPU time it has used, in seconds, from schedstat (nanoseconds)."""
        return _cpu_s(self.pid)

    def broker_cpu_s(self) -> float:
        """Return the CPU time that its broker has used."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(_cpu_s(int(pid)) for pid in children)

    def memory_mib(self, field: str = "VmRSS") -> float:
        """Return a field of its status file in MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
        raise BenchError(f"no {field} of the daemon")


def _cpu_s(pid: int) -> float:
    spent = sum(
        int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0])
        for tid in os.listdir(f"/proc/{pid}/task")
    )
    return spent / 1e9


@contextlib.contextmanager
def service(
    node: BenchNode, command: Sequence[str] = KATA_PIN, /, **settings: object
) -> Iterator[ServiceProcess]:
    """Run the daemon until the end of the block; settings go to its configuration file.

    `command` is what takes the place of `kata-pin`.
    """
    log_file = node.root / "daemon.log"
    config = node.config_file(**settings)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", str(config), "run"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    running = ServiceProcess(process, log_file)
    try:
        wait_for(lambda: "serves" in running.log or process.poll() is not None, "the daemon", 30)
        if process.poll() is not None:
            raise BenchError(f"the daemon ended: {running.log[-400:]}")
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Serving(Notifier):
    """Knows when the daemon is ready."""

    def __init__(self) -> None:
        super().__init__({})
        self.event = asyncio.Event()

    def send(self, *assignments: str) -> None:
        """Take note of it."""
        if "READY=1" in assignments:
            self.event.set()


class LocalService(Daemon):
    """The Daemon in this process; its parts are reached as a pass or an event reaches them."""

    parts: Assembly

    def __init__(self, config: Config, broker: Broker) -> None:
        serving = Serving()
        root = HostRoot(debugfs=config.paths.debugfs, calls=broker.calls)
        super().__init__(config, lambda: config, serving, broker, root)
        self.serving = serving.event

    async def serve(self, parts: Assembly, background: Background) -> None:
        """See Daemon."""
        self.parts = parts
        await super().serve(parts, background)

    async def settle(self, ids: Collection[str], timeout_s: float = 120.0) -> None:
        """Wait until each of these sandboxes had a pass, and no thread of it is young."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            caches = [self.parts.sandboxes.cache(one) for one in ids]
            if all(one is not None and one.vmm and one.report for one in caches):
                await asyncio.sleep(YOUNG_S * 1.25)  # until then they are looked at again
                return
            await asyncio.sleep(0.02)
        raise BenchError(f"{len(ids)} sandboxes have not settled")

    def keep_only(self, ids: Collection[str]) -> None:
        """Forget the sandboxes of others, which every daemon of this machine adopts."""
        for stranger in set(self.parts.sandboxes.ids) - set(ids):
            self.parts.passes.drop(stranger)


@contextlib.contextmanager
def our_cpus_kept() -> Iterator[None]:
    """Give the threads of this process the pCPUs of its first one back at the end of the block."""
    cpus = os.sched_getaffinity(0)
    try:
        yield
    finally:
        for tid in list_tids(HOST, os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(tid, cpus)


@contextlib.asynccontextmanager
async def local_service(config: Config) -> AsyncIterator[LocalService]:
    """Run a Daemon in this event loop until the end of the block; then this process is as before.

    A daemon keeps itself off exclusive pCPUs, and whatever is measured next would inherit that.
    """
    with our_cpus_kept(), brokered(config) as broker:
        calm_collector()  # as `kata-pin run` does
        daemon = LocalService(config, broker)
        running = asyncio.create_task(daemon.run())
        try:
            serving = asyncio.create_task(daemon.serving.wait())
            await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            yield daemon
        finally:
            daemon.stopping.set()
            await running
