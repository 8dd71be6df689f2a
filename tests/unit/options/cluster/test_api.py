"""Requests to an API server that refuses, stalls, floods or lies; and how Events repeat."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kata_pin.base.errors import StateError
from kata_pin.options.cluster import publisher as series_module
from kata_pin.options.cluster.api import FIRST_S, LONGEST_S, ApiRefused, ApiServer, Backoff
from kata_pin.options.cluster.decide import NOTHING_KNOWN
from kata_pin.options.cluster.publisher import Series, event_name
from kata_pin.options.cluster.values import MAX_ANSWER, PodEvent
from kata_pin.peers.http import HttpClient
from tests.support.apidouble import (
    CONFLICT,
    CREATED,
    MISSING,
    UNDECLARED,
    ApiDouble,
    api_double,
    event,
    refusal,
)

STATUS = "/apis/kata-pin.io/v1alpha1/nodeplacements/n1/status?fieldManager=kata-pin&force=true"
MAIN = STATUS.replace("/status", "")
EVENT = PodEvent("ExclusiveCPUConflict", "s1", "shop/web", "uid-1", "shared", "PlacingThreads")
EVENTS = "/apis/events.k8s.io/v1/namespaces/shop/events"


@pytest.fixture
def double() -> Iterator[ApiDouble]:
    with api_double() as one:
        yield one


def server(double: ApiDouble, **options: float) -> ApiServer:
    """Return a client of it."""
    return ApiServer(HttpClient(double.url, most=MAX_ANSWER, **options))  # type: ignore[arg-type]


async def test_an_object_that_exists(double: ApiDouble) -> None:
    """One request: its status, as an apply patch."""
    await server(double).apply("n1", "u1", NOTHING_KNOWN)
    ((method, path, body),) = double.requests
    assert (method, path, double.types) == ("PATCH", STATUS, ["application/apply-patch+yaml"])
    assert body["metadata"] == {"name": "n1"}
    assert body["status"]["freeSource"] == "unclaimed"
    assert "lastAudit" not in body["status"]


async def test_an_object_that_is_missing(double: ApiDouble) -> None:
    """It is created with its owner, then its status is written."""
    double.answers = [MISSING, CREATED]
    await server(double).apply("n1", "u1", NOTHING_KNOWN)
    assert [path for _, path, _ in double.requests] == [STATUS, MAIN, STATUS]
    (owner,) = double.requests[1][2]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", "n1", "u1")
    assert "status" not in double.requests[1][2]


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "token"), (403, "admission policy"), (409, "409"), (410, "no longer"), (500, "500")],
)
async def test_refusals(double: ApiDouble, status: int, said: str) -> None:
    """The status and the server's message are named, and what to do."""
    double.answers = [refusal(status, "no\x1b[31m" + "x" * 9999)]
    with pytest.raises(ApiRefused, match=said) as caught:
        await server(double).apply("n1", "u1", NOTHING_KNOWN)
    assert caught.value.status == status
    assert "no [31mxxx" in caught.value.message
    assert len(caught.value.message) < 500


async def test_a_definition_of_another_version(double: ApiDouble) -> None:
    """kube-apiserver 1.34 answers so to a field that the installed one does not have."""
    double.answers = [UNDECLARED]
    with pytest.raises(ApiRefused) as caught:
        await server(double).apply("n1", "u1", NOTHING_KNOWN)
    assert "CustomResourceDefinition is of another version" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "wait"), [("7", 7.0), ("99999", 300.0), ("-1", 0.0), ("x", 0.0), ("1e9", 0.0)]
)
async def test_too_many_requests(double: ApiDouble, asked: str, wait: float) -> None:
    """The server's wish is known, within bounds."""
    double.answers = [(429, b"", {"Retry-After": asked})]
    with pytest.raises(ApiRefused) as caught:
        await server(double).apply("n1", "u1", NOTHING_KNOWN)
    assert caught.value.after_s == wait


async def test_answers_without_end_or_sense(double: ApiDouble) -> None:
    """A long answer is not read to its end; one that is no JSON says nothing."""
    double.answers = [(200, b"x" * (MAX_ANSWER + 1), {}), (500, b"<html>\xff", {})]
    with pytest.raises(StateError, match="longer than"):
        await server(double).apply("n1", "u1", NOTHING_KNOWN)
    with pytest.raises(ApiRefused, match=r"HTTP 500$"):
        await server(double).apply("n1", "u1", NOTHING_KNOWN)


async def test_a_server_that_stalls(double: ApiDouble) -> None:
    """The deadline holds."""
    double.delay_s = 20
    began = time.monotonic()
    with pytest.raises(StateError, match="no answer within"):
        await server(double, deadline_s=0.2).apply("n1", "u1", NOTHING_KNOWN)
    assert time.monotonic() - began < 10


def test_waits_grow_and_are_random() -> None:
    """From about a second to five minutes; a wish of the server is added."""
    backoff = Backoff()
    waits = [backoff.failed() for _ in range(40)]
    assert FIRST_S / 2 <= waits[0] <= FIRST_S
    assert all(LONGEST_S / 2 <= one <= LONGEST_S for one in waits[20:])
    assert len(set(waits[20:])) > 1
    assert backoff.failed(100.0) >= 100 + LONGEST_S / 2
    backoff.succeeded()
    assert backoff.failed() <= FIRST_S


# ---- Events ----------------------------------------------------------------------------------


async def test_one_event_per_kind_and_sandbox(double: ApiDouble) -> None:
    """While it lasts nothing more is written, but for the half-hourly count."""
    series = Series(server(double), "n1")
    for _ in range(3):
        await series.report([EVENT])
    ((method, path, body),) = double.requests
    assert (method, path) == ("POST", EVENTS)
    assert body["regarding"]["name"] == "web"
    assert body["metadata"]["name"] == event_name(EVENT)


async def test_an_event_that_lasts(double: ApiDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the half hour, not for the minute of one that comes back."""
    series = Series(server(double), "n1")
    await series.report([EVENT])
    monkeypatch.setattr(series_module, "AGAIN_S", 0.0)
    await series.report([EVENT])
    assert len(double.requests) == 1
    monkeypatch.setattr(series_module, "LASTS_S", 0.0)
    await series.report([EVENT])
    assert len(double.requests) == 2


async def test_only_so_many_events_are_remembered(
    double: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are forgotten; one that is reported again is among the newest."""
    monkeypatch.setattr(series_module, "MOST", 2)
    series = Series(server(double), "n1")
    first, second, third = (PodEvent(kind, *_rest()) for kind in "ABC")
    for events in ([first], [second], [third]):
        await series.report(events)
    assert len(double.requests) == 3
    await series.report([second, third])
    assert len(double.requests) == 3
    await series.report([first])
    assert len(double.requests) == 4


async def test_an_event_that_comes_back(double: ApiDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted once more, as its series has it."""
    monkeypatch.setattr(series_module, "AGAIN_S", 0.0)
    series = Series(server(double), "n1")
    await series.report([EVENT])
    await series.report([])
    double.answers = [CONFLICT, event(4)]
    await series.report([EVENT])
    assert [one[0] for one in double.requests] == ["POST", "POST", "PATCH", "PATCH"]
    assert double.requests[2][2] == {}
    assert double.requests[3][2]["series"]["count"] == 5


@pytest.mark.parametrize("status", [403, 404, 422])
async def test_an_event_that_cannot_be_written(double: ApiDouble, status: int) -> None:
    """A namespace that is being deleted holds up no other Event."""
    double.answers = [(status, b"", {})]
    await Series(server(double), "n1").report([EVENT, EVENT.__class__("B", *_rest())])
    assert len(double.requests) == 2


def _rest() -> tuple[str, str, str, str, str]:
    return "s1", "shop/web", "uid-1", "note", "action"


async def test_an_api_server_that_is_busy(double: ApiDouble) -> None:
    """What was not written is written next time."""
    series = Series(server(double), "n1")
    double.answers = [(429, b"", {})]
    with pytest.raises(ApiRefused):
        await series.report([EVENT])
    await series.report([EVENT])
    assert len(double.requests) == 2


async def test_a_flood(double: ApiDouble) -> None:
    """So many requests at once at most, and so many Events are remembered."""
    series = Series(server(double), "n1")
    every = [PodEvent("A", f"s{number}", *_rest()[1:]) for number in range(40)]
    await series.report(every)
    assert len(double.requests) == series_module.MOST_AT_ONCE


@pytest.mark.parametrize("pod", ["a/../b", "shop/", "Shop/web", "shop/" + "x" * 300, "a/b/c"])
async def test_names_that_are_none(double: ApiDouble, pod: str) -> None:
    """Nothing that could leave the path is sent."""
    await Series(server(double), "n1").report([PodEvent("A", "s", pod, *_rest()[2:])])
    assert double.requests == []


def test_names_of_events_are_valid() -> None:
    """Bounded, and the same for the same kind and sandbox."""
    long = PodEvent("A", "s", "shop/" + "a" * 229 + "-" + "b" * 20, *_rest()[2:])
    assert len(event_name(long)) <= 253
    assert "-." not in event_name(long)
    assert event_name(EVENT) == event_name(PodEvent(EVENT.kind, "s1", EVENT.pod, *_rest()[2:]))
