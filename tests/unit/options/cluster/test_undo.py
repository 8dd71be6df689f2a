"""The rollout that restores affinities, with an API server whose answers are chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kata_pin.base.errors import KataPinError
from kata_pin.options.cluster import api
from kata_pin.options.cluster.api import Rollout
from kata_pin.peers.http import HttpClient
from tests.support.apidouble import FORBIDDEN, MISSING, ApiDouble, api_double, daemonset


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiDouble]:
    monkeypatch.setattr(api, "LOOK_S", 0.01)
    monkeypatch.setattr(api, "FIRST_S", 0.01)
    with api_double() as one:
        yield one


async def released(
    double: ApiDouble, timeout_s: float = 20.0, *, classes: bool = False
) -> list[str]:
    """Return what is said while all nodes are released, and the result."""
    said: list[str] = []
    rollout = Rollout(HttpClient(double.url), "kata-pin", "kata-pin", said.append, classes)
    result = await rollout.release(timeout_s)
    return [*said, result]


async def test_a_rollout(double: ApiDouble) -> None:
    """It ends when all pods are new and ready; what an old status says does not count."""
    double.answers = [
        daemonset(2, 2, 2, seen=1),
        daemonset(2, 1, 2),
        daemonset(2, 2, 1),
        daemonset(2, 2, 2),
    ]
    said = await released(double)
    assert said[:-1] == ["0 of 2 nodes released", "1 of 2 nodes released", "2 of 2 nodes released"]
    assert said[-1] == "2 of 2 nodes released"
    (method, path, body), *looks = double.requests
    assert (method, path) == ("PATCH", "/apis/apps/v1/namespaces/kata-pin/daemonsets/kata-pin")
    assert double.types[0] == "application/strategic-merge-patch+json"
    (daemon,) = body["spec"]["template"]["spec"]["containers"]
    command = daemon["lifecycle"]["postStart"]["exec"]["command"]
    assert command[:2] == ["/usr/bin/kata-pin", "release"]
    assert "initContainers" not in body["spec"]["template"]["spec"]
    assert [one[0] for one in looks] == ["GET"] * 3


async def test_files_of_classes_go(double: ApiDouble) -> None:
    """The container that wrote them removes them, with nothing but other arguments."""
    double.answers = [daemonset(1, 1, 1)]
    await released(double, classes=True)
    (writer,) = double.requests[0][2]["spec"]["template"]["spec"]["initContainers"]
    assert writer == {"name": "kata-classes", "args": ["kata-class", "--remove", "--chroot=/host"]}


async def test_no_daemonset(double: ApiDouble) -> None:
    """Nothing is left to be done."""
    double.answers = [MISSING]
    assert await released(double) == ["there is no DaemonSet kata-pin/kata-pin: nothing to release"]


async def test_refusals(double: ApiDouble) -> None:
    """What lasts ends it at once, anything else is tried again."""
    double.answers = [FORBIDDEN]
    with pytest.raises(KataPinError, match="HTTP 403"):
        await released(double)
    double.answers = [
        (500, b"", {}),
        daemonset(1, 1, 1),
    ]
    said = await released(double)
    assert "HTTP 500; trying again" in said[0]
    double.answers = [(200, b"[]", {})]
    with pytest.raises(KataPinError, match="not an object"):
        await released(double)


async def test_a_node_that_is_never_ready(double: ApiDouble) -> None:
    """It fails in time, and says how far it came."""
    double.answers = [daemonset(3, 2, 2)] * 10_000
    with pytest.raises(KataPinError, match=r"2 of 3 nodes released within 0\.2 s"):
        await released(double, 0.2)
