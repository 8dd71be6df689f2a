"""Another NRI plugin that decides cpusets, run in a thread of the test.

    with rival(socket, index="50", cpus="0") as other:
        ...

It gives every new container the same CPUs, or other resources. It is kata-pin's own connection with
another decider.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.nri.messages import Event, EventKind, Snapshot
from kata_pin.peers.nri.plugin import NriPlugin
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from tests.support.waiting import wait_for


class Rival:
    """The decider; `creations` is how often it was asked."""

    def __init__(self, answer: NriAnswer) -> None:
        self._answer = answer
        self.creations = 0
        self.synchronized = False

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Take note that events flow from now on."""
        self.synchronized = True

    def receive(self, event: Event, stamp_ns: int) -> int:
        """Ignore what is only told."""
        return 0

    async def placed(self, event: Event, ticket: int) -> None:
        """Wait for nothing."""

    def adopt(self, snapshot: Snapshot) -> tuple[Update, ...]:
        """Leave what runs as it is."""
        return ()

    def decide(self, event: Event, stamp_ns: int) -> NriAnswer:
        """Give every new container the same."""
        if event.kind is not EventKind.CREATE_CONTAINER:
            return NriAnswer()
        self.creations += 1
        return self._answer

    def ended(self) -> None:
        """Take note of nothing."""


@contextlib.contextmanager
def rival(
    socket: Path, *, index: str, cpus: str = "", answer: NriAnswer | None = None
) -> Iterator[Rival]:
    """Run the plugin meanwhile."""
    decider = Rival(answer or NriAnswer(Cpuset(CpuSet.parse(cpus))))
    loop = asyncio.new_event_loop()

    def work() -> None:
        plugin = NriPlugin(
            decider,
            socket_path=str(socket),
            name="rival",
            index=index,
            wanted=True,
            decider=decider,
        )
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task := loop.create_task(plugin.run()))
            del task

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_for(lambda: decider.synchronized, "the rival to be registered")
        yield decider
    finally:
        loop.call_soon_threadsafe(lambda: [one.cancel() for one in asyncio.all_tasks(loop)])
        thread.join(20)
        loop.close()
