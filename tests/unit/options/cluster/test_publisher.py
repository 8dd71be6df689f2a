"""When the object is written, what happens while daemon or API server are away, the pages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import State
from kata_pin.base.errors import DaemonError, KataPinError
from kata_pin.options.cluster import publisher as publisher_module
from kata_pin.options.cluster.api import ApiServer
from kata_pin.options.cluster.publisher import (
    NodeDaemon,
    Publisher,
    Reporter,
    StartupTaint,
)
from kata_pin.peers.http import HttpClient
from kata_pin.service.exchange import DaemonAway
from tests.support.apidouble import FORBIDDEN, ApiDouble, api_double
from tests.unit.cli import documents


class Played(NodeDaemon):
    """A daemon that answers with what a test says."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.__dict__.update(answer=documents.state(), stuck=False)

    def play(self, answer: State | KataPinError, *, stuck: bool = False) -> None:
        """Answer with this from now on."""
        self.__dict__.update(answer=answer, stuck=stuck)

    async def state(self) -> State:
        answer = self.__dict__["answer"]
        if isinstance(answer, KataPinError):
            raise answer
        assert isinstance(answer, State)
        return answer

    async def watch(self) -> WatchDocument | None:
        return None

    async def is_stuck(self) -> bool:
        return bool(self.__dict__["stuck"])

    async def metrics(self) -> bytes:
        await self.state()
        return b"kata_pin_sandboxes 0\n"


@pytest.fixture
def double() -> Iterator[ApiDouble]:
    with api_double() as one:
        yield one


def publisher(double: ApiDouble) -> tuple[Publisher, Played]:
    """Return a publisher and its daemon."""
    daemon = Played()
    return Publisher(daemon, ApiServer(HttpClient(double.url)), "n1", "u1"), daemon


async def test_the_daemons_pod_is_named(double: ApiDouble) -> None:
    """For `kubectl kata-pin`; also while the daemon is away."""
    one, daemon = publisher(double)
    one.pod = "kata-pin/kp-1"
    for answer in (documents.state(), DaemonError("no daemon")):
        daemon.play(answer)
        await one.look()
        await one.publish()
    assert [body["status"]["daemonPod"] for _, _, body in double.requests] == [one.pod] * 2


async def test_writes_on_change_only(double: ApiDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit alone is no change; what lasts is written at the heartbeat."""
    one, daemon = publisher(double)
    for second in range(3):
        daemon.play(replace(documents.state(), time=f"2026-11-23T04:00:0{second}Z"))
        await one.look()
        await one.publish()
    assert len(double.requests) == 1
    daemon.play(documents.state(documents.drifted()))
    await one.look()
    await one.publish()
    assert len(double.requests) == 2
    assert "daemonPod" not in double.requests[1][2]["status"]
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.0)
    await one.publish()
    assert len(double.requests) == 3
    assert one.requests == {"ok": 3}


async def test_a_condition_has_the_time_of_its_last_change(
    double: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the API wants it: that the daemon was asked again is no change."""
    hours = itertools.count()

    def now(tz: object) -> datetime:
        return datetime(2026, 1, 1, next(hours), tzinfo=UTC)

    monkeypatch.setattr(publisher_module, "datetime", SimpleNamespace(now=now))
    one, daemon = publisher(double)
    times = []
    for answer in (documents.state(), documents.state(), DaemonError("no daemon")):
        daemon.play(answer)
        await one.look()
        times.append({each.last_transition_time for each in one.status.conditions})
    assert times[0] == times[1]
    assert times[2].isdisjoint(times[0])


def is_not_ready(one: Publisher) -> bool:
    """Whether it is not ready now; mypy believes that a property keeps its value."""
    return not one.is_ready


async def test_a_daemon_that_is_away(double: ApiDouble) -> None:
    """The object keeps what is known and says that it is not ready, since when."""
    one, daemon = publisher(double)
    await one.look()
    assert one.is_ready
    daemon.play(DaemonError("no daemon is listening"))
    await one.look()
    assert is_not_ready(one)
    first = one.status.conditions[0]
    assert (first.reason, first.message) == ("DaemonAway", "no daemon is listening")
    assert one.status.version
    await one.look()
    assert one.status.conditions[0] == first
    daemon.play(documents.state())
    await one.look()
    assert one.is_ready


async def test_an_api_server_that_is_away(double: ApiDouble) -> None:
    """Nothing is sent before the wait is over, and the newest state is sent then."""
    one, _ = publisher(double)
    double.answers = [(503, b"", {"Retry-After": "30"})]
    await one.look()
    await one.publish()
    assert one.requests == {"503": 1}
    assert one._not_before - time.monotonic() > 25
    assert "HTTP 503" in one.api_problem
    await one.publish()
    assert (one.api_problem, len(double.requests)) == ("", 2)


async def test_an_api_server_that_refuses_is_left_alone(double: ApiDouble) -> None:
    """While the wait lasts the daemon is read, and nothing is written."""
    one, daemon = publisher(double)
    one.period_s = 0.001
    double.answers = [(503, b"", {"Retry-After": "300"})]
    looks = itertools.count()
    enough = asyncio.Event()

    async def state() -> State:
        if next(looks) == 5:
            enough.set()
        return documents.state(documents.drifted())

    daemon.__dict__["state"] = state
    work = asyncio.create_task(one.run())
    try:
        async with asyncio.timeout(20):
            await enough.wait()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert len(double.requests) == 1


async def test_a_daemon_without_a_watch_is_not_one_that_is_away(tmp_path: Path) -> None:
    """What cannot be asked is an error; only an older daemon has no such document."""
    with pytest.raises(DaemonAway):
        await NodeDaemon(str(tmp_path)).watch()


async def test_a_part_that_fails_stops_no_other(double: ApiDouble) -> None:
    """The node's object is written though the taint cannot be removed; the first failure counts."""
    one, _ = publisher(double)
    one.taint = StartupTaint(one.api, "n1", "kata-pin.io/starting")
    double.answers = [FORBIDDEN]
    await one.look()
    await one.publish()
    assert one.requests == {"ok": 1, "403": 1}
    assert [method for method, _, _ in double.requests] == ["PATCH", "PATCH"]


async def ask(address: tuple[str, int], path: str) -> tuple[str, str]:
    """Return the status line and the body of a page."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.split("\r\n")[0].split(" ", 1)[1], body


async def test_the_pages(double: ApiDouble, unused_tcp_port: int) -> None:
    """Probes tell a daemon that is away from one that is stuck; metrics are relayed."""
    one, daemon = publisher(double)
    one.period_s = 0.01
    work = asyncio.create_task(Reporter(daemon, one, ("127.0.0.1", unused_tcp_port)).run())
    address = ("127.0.0.1", unused_tcp_port)
    try:
        async with asyncio.timeout(20):
            while is_not_ready(one) or not one.requests:
                await asyncio.sleep(0.01)
            assert await ask(address, "/healthz") == ("200 OK", "ok\n")
            assert (await ask(address, "/readyz"))[0] == "200 OK"
            status, text = await ask(address, "/metrics")
            assert status == "200 OK"
            assert text.startswith("kata_pin_sandboxes 0\n")
            assert 'kata_pin_reporter_requests_total{outcome="ok"}' in text
            assert (await ask(address, "/secrets"))[0] == "404 Not Found"
            daemon.play(DaemonError("no daemon is listening"))
            while not is_not_ready(one):
                await asyncio.sleep(0.01)
            status, text = await ask(address, "/readyz")
            assert (status, text) == (
                "503 Service Unavailable", "DaemonAway: no daemon is listening\n",
            )  # fmt: skip
            assert (await ask(address, "/metrics"))[0] == "503 Service Unavailable"
            assert (await ask(address, "/livez"))[0] == "200 OK"
            daemon.play(DaemonError("silent"), stuck=True)
            assert (await ask(address, "/livez"))[0] == "503 Service Unavailable"
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def test_an_address_that_is_taken(double: ApiDouble) -> None:
    """The reporter ends with an error that names it."""
    one, daemon = publisher(double)
    host, port = double.server_address[:2]
    with pytest.raises(KataPinError, match=f"cannot serve {host!s}:{port}: Address already in use"):
        await Reporter(daemon, one, (str(host), int(port))).run()
