"""Checks of QMP answers: shape, bounds, and what a hostile QEMU would say."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import RemoteProtocolError
from kata_pin.peers.qemu import QmpCpu, QmpIothread, check_answers


def cpu(index: object = 0, thread: object = 100, **more: object) -> dict[str, object]:
    return {"cpu-index": index, "thread-id": thread, "target": "x86_64"} | more


def test_answers() -> None:
    """cpu-index, ids and thread ids are kept, whatever else is said."""
    props = {"core-id": 0, "thread-id": 0, "node-id": 0, "socket-id": 15}
    cpus = [cpu(0, 100), cpu(15, 108, **{"qom-path": "/machine/peripheral/cpu-0", "props": props})]
    answers = check_answers(cpus, [{"id": "a", "thread-id": 200, "poll-max-ns": 0}])
    assert answers.cpus == (QmpCpu(0, 100), QmpCpu(15, 108))
    assert answers.iothreads == (QmpIothread("a", 200),)
    assert check_answers([], []).cpus == ()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        pytest.param(None, "Expected `array`", id="nothing"),
        pytest.param({}, "Expected `array`", id="object"),
        pytest.param("x", "Expected `array`", id="text"),
        pytest.param([1], "Expected `object`", id="entry is a number"),
        pytest.param([cpu(thread=0)], ">= 1", id="tid 0"),
        pytest.param([cpu(thread=-1)], ">= 1", id="negative tid"),
        pytest.param([cpu(thread=1 << 30)], "<= 4194304", id="absurd tid"),
        pytest.param([cpu(thread=True)], "Expected `int`", id="boolean tid"),
        pytest.param([cpu(thread=1.0)], "Expected `int`", id="float tid"),
        pytest.param([cpu(thread="1")], "Expected `int`", id="text tid"),
        pytest.param([cpu(thread=None)], "Expected `int`", id="no tid"),
        pytest.param([{"cpu-index": 0}], "missing required field `thread-id`", id="tid missing"),
        pytest.param([cpu(index=4096)], "<= 4095", id="absurd index"),
        pytest.param([cpu(index=True)], "Expected `int`", id="boolean index"),
        pytest.param([{}] * 5000, "length <= 4096", id="too many"),
    ],
)
def test_hostile_cpus(reply: object, message: str) -> None:
    """One wrong entry makes the whole answer worthless."""
    with pytest.raises(RemoteProtocolError, match=rf"{message}.*\$\.query-cpus-fast"):
        check_answers(reply, [])


def test_a_key_that_no_text_can_have() -> None:
    """A lone surrogate in a key, which JSON lets through, is the peer's error like any other."""
    with pytest.raises(RemoteProtocolError, match="surrogates not allowed"):
        check_answers([cpu(**{"\ud800": 1})], [])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([{"thread-id": 1}], "missing required field `id`"),
        ([{"id": "x" * 300, "thread-id": 1}], "length <= 256"),
        ([{"id": "a", "thread-id": 0}], ">= 1"),
    ],
)
def test_hostile_iothreads(reply: object, message: str) -> None:
    """The same for iothreads."""
    with pytest.raises(RemoteProtocolError, match=rf"{message}.*\$\.query-iothreads"):
        check_answers([], reply)


@pytest.mark.parametrize(
    ("cpus", "iothreads", "what"),
    [
        ([cpu(0, 1), cpu(0, 2)], [], "cpu-index"),
        ([cpu(0, 1), cpu(1, 1)], [], "thread-id"),
        ([], [{"id": "a", "thread-id": 1}, {"id": "a", "thread-id": 2}], "iothread id"),
        ([], [{"id": "a", "thread-id": 1}, {"id": "b", "thread-id": 1}], "thread-id"),
        ([cpu(0, 200)], [{"id": "a", "thread-id": 200}], "thread-id"),
    ],
)
def test_nothing_twice(cpus: object, iothreads: object, what: str) -> None:
    """One thread cannot be two vCPUs, or a vCPU and an iothread."""
    with pytest.raises(RemoteProtocolError, match=f"the same {what} appears twice"):
        check_answers(cpus, iothreads)
