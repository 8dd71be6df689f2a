"""An in-place resize: the kubelet's checkpoint changes first, the cpuset seconds later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import KubeletState, Node, Placement
from kata_pin.base.sandbox import Thread
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from kata_pin.placement.place import pairs
from tests.support.at_once import place
from tests.support.world import (
    after,
    applied,
    cpus,
    kubelet,
    main_thread,
    node,
    sandbox,
    shared,
    vcpus,
)

SIDE = replace(shared("side", "0,8-15"), name="side")


def at(entry: str, others: str = "") -> Node:
    """Return a node whose checkpoint gives `entry` to the container, `others` to another pod."""
    state: KubeletState = kubelet({"app": entry}, default="0,8-15")
    entries: Mapping[str, Mapping[str, CpuSet]] = dict(state.entries) | {
        "other": {"x": cpus(others)}
    }
    return replace(node(), kubelet=replace(state, entries=entries))


def settle(
    held: str, where: Node, threads: Sequence[Thread], before: Placement | None, pod: str = "uid"
) -> Placement:
    """Return the next placement of `app` with the cpuset `held`, after the one `before`."""
    app = replace(shared("app", held), pod_uid=pod)
    kept = {} if before is None else pairs(before)
    return place(sandbox(app, SIDE), threads, where, kept=kept)


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("2-3", "2", id="shrinks"),
        pytest.param("2-3", "2-4", id="grows"),
        pytest.param("2-3", "4-5", id="moves"),
        pytest.param("2-3", "3-4", id="moves in part"),
    ],
)
def test_pairs_stay_until_the_cpuset_arrives(before: str, then: str) -> None:
    """Between the two nothing moves; afterwards the pairs are on the new CPUs."""
    threads: list[Thread] = [*vcpus(0, 1, 2), main_thread()]
    settled = settle(before, at(before), threads, None)
    threads = after(settled, threads)
    between = settle(before, at(then), threads, settled)
    assert applied(between, threads) == applied(settled, threads)
    assert f"its checkpoint entry is {then}" in between.mask.claims[0].reason
    done = settle(then, at(then), after(between, threads), between)
    assert str(done.mask.exclusive) == then
    assert applied(done, threads)["emulator"] == "0,8-15"


def test_a_container_that_kubelet_1_37_grew() -> None:
    """What its checkpoint keeps of the former CPUs (`baselines`) pairs nothing."""
    file = Path(__file__).parents[2] / "data/kubelet/kubelet_checkpoints.json"
    row = json.loads(file.read_text())["checkpoints"][-1]
    recorded = parse_checkpoint(row["file"].encode())
    ((pod, entry),) = recorded.entries.items()
    grown = replace(recorded, entries={pod: {"app": entry["a"]}})
    small = replace(recorded, entries={pod: {"app": cpus("1-2")}}, default=cpus("0,3-15"))
    threads: list[Thread] = [*vcpus(0, 1, 2, 3, 4), main_thread()]
    settled = settle("1-2", replace(node(), kubelet=small), threads, None, pod)
    assert str(settled.mask.exclusive) == "1-2"
    threads = after(settled, threads)
    where = replace(node(), kubelet=grown)
    between = settle("1-2", where, threads, settled, pod)
    assert applied(between, threads) == applied(settled, threads)
    done = settle("1-4", where, after(between, threads), between, pod)
    assert str(done.mask.exclusive) == "1-4"
    assert sorted(pairs(done).values()) == [1, 2, 3, 4]


def test_pairs_that_became_illegal_go() -> None:
    """A CPU that another pod has by now is not kept."""
    threads: list[Thread] = [*vcpus(0, 1, 2), main_thread()]
    settled = settle("2-3", at("2-3"), threads, None)
    between = settle("2-3", at("4-5", others="3"), threads, settled)
    assert str(between.mask.exclusive) == "2"
    assert "3" not in applied(between, threads).values()


def test_a_stale_record_is_no_resize() -> None:
    """A cpuset wider than the entry, without pairs of its own, gives only the entry."""
    threads = vcpus(0, 1)
    found = settle("0-15", at("2-3"), threads, None)
    assert str(found.mask.exclusive) == "2-3"
