"""The process `kata-pin reporter`: the loop, and the pages that probes and Prometheus read.

`/healthz` says that this process lives, `/readyz` that the daemon serves, `/livez` that the daemon
is not stuck, `/metrics` relays the daemon's metrics with a few of our own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import KataPinError, reason_of
from kata_pin.reporter.node import NodeDaemon
from kata_pin.reporter.publisher import Publisher
from kata_pin.sources.http_server import MAX_HEAD, TEXT, Page, Pages, answer, tcp_listener
from kata_pin.sources.stream_clients import Clients, send

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 16
SEND_S: Final = 10.0


@dataclass(frozen=True)
class Address:
    """Where the pages are served."""

    host: str
    port: int


@dataclass
class Reporter:
    """Serves until SIGTERM or SIGINT; without `writes` nothing is sent to the API server."""

    daemon: NodeDaemon
    publisher: Publisher
    address: Address
    writes: bool = True

    async def run(self) -> None:
        """Serve; raises KataPinError where the address cannot be had."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            listener = tcp_listener(self.address.host, self.address.port)
        except (OSError, OverflowError) as error:
            where = f"{self.address.host}:{self.address.port}"
            raise KataPinError(f"cannot serve {where}: {reason_of(error)}") from error
        clients = Clients("client", MAX_CLIENTS, self._talk, limit=MAX_HEAD)
        async with clients.served(listener):
            host, port = listener.getsockname()[:2]
            log.info("reporting node %s; http://%s:%d", self.publisher.node, host, port)
            work = asyncio.create_task(self._work())
            ended = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, ended):
                    task.cancel()
                await asyncio.gather(work, ended, return_exceptions=True)

    async def _work(self) -> None:
        if self.writes:
            await self.publisher.run()
        while True:
            await self.publisher.look()
            await asyncio.sleep(self.publisher.period_s)

    @property
    def pages(self) -> Pages:
        """What is served."""
        return {
            b"/healthz": self._healthz,
            b"/livez": self._livez,
            b"/readyz": self._readyz,
            b"/metrics": self._metrics,
        }

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, await answer(reader, self.pages), SEND_S)

    async def _healthz(self) -> Page:
        return Page(b"ok\n", kind=TEXT)

    async def _livez(self) -> Page:
        if await self.daemon.is_stuck():
            return Page(b"the daemon accepts connections, but does not answer\n", 503, TEXT)
        return Page(b"ok\n", kind=TEXT)

    async def _readyz(self) -> Page:
        publisher = self.publisher
        said = [f"{one.reason}: {one.message}" for one in publisher.status.conditions]
        text = "\n".join([*(said or [publisher.problem]), *filter(None, [publisher.api_problem])])
        body = text.encode("utf-8", "backslashreplace") + b"\n"
        return Page(body, 200 if publisher.is_ready else 503, TEXT)

    async def _metrics(self) -> Page:
        try:
            text = await self.daemon.metrics()
        except KataPinError as error:
            return Page(f"{error.message}\n".encode("utf-8", "backslashreplace"), 503, TEXT)
        return Page(text + self._own_metrics())

    def _own_metrics(self) -> bytes:
        lines = [
            "# HELP kata_pin_reporter_requests_total Writes to the API server, by outcome.",
            "# TYPE kata_pin_reporter_requests_total counter",
        ]
        for outcome, count in sorted(self.publisher.requests.items()):
            lines.append(f'kata_pin_reporter_requests_total{{outcome="{outcome}"}} {count}')
        return "\n".join([*lines, ""]).encode()


def serve(reporter: Reporter, *, debug: bool) -> None:
    """Run the reporter in the foreground until SIGTERM or SIGINT; raises KataPinError."""
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")
    asyncio.run(reporter.run())
