"""How many vCPUs a VM gets: every recorded answer of Kata's own functions, and of the real shim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import KataRuntime
from kata_pin.placement.vm_size import (
    RULES,
    ContainerCpu,
    PodCpu,
    Sizing,
    exclusive_pod,
    rule_of,
    vm_size,
)

DATA = Path(__file__).parents[2] / "data" / "kata-sizing"
PODS = json.loads((DATA / "pods.json").read_text())


def answers(name: str) -> list[list[str]]:
    """Return the rows of a table, without its head."""
    return [line.split("\t") for line in (DATA / name).read_text().splitlines()[1:]]


def pod_named(name: str) -> PodCpu:
    """Return a recorded pod."""
    told = PODS[name]
    containers = [
        ContainerCpu(each["quota"], each["period"], CpuSet.parse(each["cpus"]))
        for each in told["containers"]
    ]
    return PodCpu(**told["sandbox"], containers=tuple(containers))


def sizing_of(row: list[str]) -> Sizing:
    """Return the settings of a row."""
    runtime, version, sizing, default, overhead, most = row[:6]
    return Sizing(
        KataRuntime(runtime),
        sizing == "static",
        float(default),
        float(overhead),
        int(most),
        tuple(map(int, version.split("."))),
    )


@pytest.mark.parametrize("table", ["answers.tsv", "measured.tsv"])
def test_every_recorded_answer(table: str) -> None:
    """The module gives what Kata gave."""
    wrong = []
    for row in answers(table):
        size = vm_size(sizing_of(row), pod_named(row[6]))
        updated = "fails" if size.updated is None else str(size.updated)
        given = [str(size.boot), str(size.running), row[9] if row[9] == "?" else updated]
        if given != row[7:]:
            wrong.append((*row, "ours", *given))
    assert not wrong


def test_the_table_covers_every_rule() -> None:
    """A rule without recorded answers would be an opinion."""
    rows = answers("answers.tsv")
    used = {id(rule_of(sizing_of(row))) for row in rows}
    assert used == set(map(id, RULES))
    assert len({tuple(row[:7]) for row in rows}) == len(rows) > 24


@pytest.mark.parametrize(
    ("version", "size"), [((), 5), ((3, 31, 0), 1), ((3, 32, 0), 5), ((4, 1, 0), 5)]
)
def test_the_version_decides(version: tuple[int, ...], size: int) -> None:
    """The Go runtime counts shares since 3.32; an unknown version stands for the newest."""
    sizing = Sizing(KataRuntime.GO, static=True, version=version)
    assert vm_size(sizing, exclusive_pod(4, quota=False)).boot == size


def test_the_pods_of_the_kubelet_are_those_recorded() -> None:
    """Made pods are sized as the recorded ones, for each setting."""
    for row in answers("answers.tsv"):
        kind, _, cpus = row[6].rpartition("-")
        made = {
            "exclusive": lambda n: exclusive_pod(n, quota=False),
            "quota-kept": lambda n: exclusive_pod(n, quota=True),
            "crio-exclusive": lambda n: exclusive_pod(n, quota=False, annotated=False),
        }.get(kind)
        if made is not None:
            size = vm_size(sizing_of(row), made(int(cpus)))
            assert [size.boot, size.running] == [int(row[7]), int(row[8])], row


def test_no_bound_and_no_containers() -> None:
    """default_maxvcpus 0 bounds nothing; a pod without containers has the vCPUs of its boot."""
    rust = Sizing(KataRuntime.RUST)
    assert vm_size(rust, exclusive_pod(200, quota=False)).running == 200
    assert vm_size(rust, PodCpu()).running == 1
    assert vm_size(Sizing(KataRuntime.GO), PodCpu()).running == 1
