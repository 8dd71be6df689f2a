"""Checks of QMP answers: shape, bounds, and what a hostile QEMU would say."""

from __future__ import annotations

import pytest

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire.qemu.qmp import (
    QmpCpu,
    QmpIothread,
    QmpPlace,
    check_answers,
    check_cpus,
    check_iothreads,
    check_slots,
)


def cpu(index: object = 0, thread: object = 100, **more: object) -> dict[str, object]:
    return {"cpu-index": index, "thread-id": thread, "target": "x86_64"} | more


def test_cpus() -> None:
    """cpu-index, thread id, place and path are kept; a plugged vCPU is known by its path."""
    props = {"core-id": 0, "thread-id": 0, "node-id": 0, "socket-id": 15}
    reply = [
        cpu(0, 100, **{"qom-path": "/machine/unattached/device[0]"}),
        cpu(15, 108, **{"qom-path": "/machine/peripheral/cpu-0", "props": props}),
    ]
    boot, plugged = check_cpus(reply)
    assert boot == QmpCpu(0, 100, "/machine/unattached/device[0]")
    assert plugged.place == QmpPlace(socket=15, core=0, thread=0, node=0)
    assert (boot.hotplugged, plugged.hotplugged) == (False, True)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        pytest.param(None, None, id="nothing"),
        pytest.param({}, "not a list", id="object"),
        pytest.param("x", "not a list", id="text"),
        pytest.param([1], r"return\[0\]: not an object", id="entry is a number"),
        pytest.param([cpu(thread=0)], "thread-id: not within", id="tid 0"),
        pytest.param([cpu(thread=-1)], "thread-id: not within", id="negative tid"),
        pytest.param([cpu(thread=1 << 30)], "thread-id: not within", id="absurd tid"),
        pytest.param([cpu(thread=True)], "thread-id: not an integer", id="boolean tid"),
        pytest.param([cpu(thread=1.0)], "thread-id: not an integer", id="float tid"),
        pytest.param([cpu(thread="1")], "thread-id: not an integer", id="text tid"),
        pytest.param([cpu(thread=None)], "thread-id: missing", id="no tid"),
        pytest.param([cpu(index=4096)], "cpu-index: not within", id="absurd index"),
        pytest.param([cpu(index=True)], "cpu-index: not an integer", id="boolean index"),
        pytest.param([cpu(0, 1), cpu(0, 2)], "cpu-index appears twice", id="index twice"),
        pytest.param([cpu(0, 1), cpu(1, 1)], "thread-id appears twice", id="tid twice"),
        pytest.param([cpu(**{"qom-path": 1})], "qom-path: not a text", id="path"),
        pytest.param([cpu(props=[])], "props: not an object", id="props"),
        pytest.param([cpu(props={"core-id": "0"})], "core-id: not an integer", id="props member"),
        pytest.param([{}] * 5000, "more than 4096 entries", id="too many"),
    ],
)
def test_hostile_cpus(reply: object, message: str | None) -> None:
    """One wrong entry makes the whole answer worthless; nothing at all is no vCPU."""
    if message is None:
        assert check_cpus(reply) == ()
        return
    with pytest.raises(RemoteProtocolError, match=f"query-cpus-fast: .*{message}"):
        check_cpus(reply)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([{"id": "a", "thread-id": 1}, {"id": "a", "thread-id": 2}], "id appears twice"),
        ([{"id": "a", "thread-id": 1}, {"id": "b", "thread-id": 1}], "thread-id appears twice"),
        ([{"thread-id": 1}], "id: missing"),
        ([{"id": "x" * 300, "thread-id": 1}], "id: longer than 256"),
        ([{"id": "a", "thread-id": 0}], "thread-id: not within"),
    ],
)
def test_hostile_iothreads(reply: object, message: str) -> None:
    """The same for iothreads."""
    with pytest.raises(RemoteProtocolError, match=f"query-iothreads: .*{message}"):
        check_iothreads(reply)


def test_slots_keep_their_order() -> None:
    """The order is the order of plugging; a free slot has no path."""
    slots = check_slots([{"props": {"socket-id": 3}}, {"props": {}, "qom-path": "/m"}])
    assert [(slot.place.socket, slot.qom_path) for slot in slots] == [(3, ""), (None, "/m")]
    with pytest.raises(RemoteProtocolError, match="props: missing"):
        check_slots([{}])


def test_answers() -> None:
    """One thread cannot be a vCPU and an iothread."""
    iothreads = [{"id": "a", "thread-id": 200}]
    answers = check_answers([cpu()], iothreads)
    assert answers.iothreads == (QmpIothread("a", 200),)
    assert answers.slots == ()
    with pytest.raises(RemoteProtocolError, match="a vCPU and an iothread"):
        check_answers([cpu(thread=200)], iothreads)
