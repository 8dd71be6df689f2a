"""Run rows that say what the kubelet answers through the real allocator; see scripts/oracle.

The formats are described in tests/data/oracles/README.md. A row passes if the allocator gives what
the row expects, or fails with the kind of error that the row expects.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.errors import ConfigError, ParseError
from kata_pin.options.allocation.accumulator import (
    CORE,
    LLC,
    NODE,
    PACKAGE,
    Accumulator,
    Machine,
    Packing,
    take_distributed,
    take_packed,
)
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policy import AllocError, AllocFailure
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from tests.support.kubelet_live import MismatchError, expect, host_topology, replay
from tests.support.kubelet_pod import ContainerRole, KubeletContainer, KubeletPod
from tests.support.kubelet_state import StaticState
from tests.support.kubelet_static import KubeletStatic

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "oracles"

ERROR_TEXTS = {
    "not enough cpus available": AllocFailure.NOT_ENOUGH_CPUS,
    "failed to allocate": AllocFailure.FAILED,
    "smt alignment": AllocFailure.SMT_ALIGNMENT,
}
"""How the kubelet's error texts begin, and the kinds that they stand for."""


@dataclass
class Topologies:
    """The topologies that rows name, each read once."""

    rows: dict[str, Row] = field(default_factory=dict)
    hosts: dict[str, HostTopology] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)

    def add(self, document: Row, file: Path) -> None:
        """Take those of a file, and those of the file that it refers to."""
        self.rows.update(document.get("topologies", {}))
        other = document.get("topologies_in")
        if other:
            near = [folder / other for folder in (file.parent, DATA) if (folder / other).exists()]
            if near:
                self.rows.update(json.loads(near[0].read_text())["topologies"])

    def machine(self, row: Row) -> Machine:
        """Return the machine that a row is about."""
        name = row["topology"]
        if name not in self.machines:
            self.machines[name] = Machine.of(self.host(row))
        return self.machines[name]

    def host(self, row: Row) -> HostTopology:
        """Return the topology that a row is about."""
        name = row["topology"]
        if name not in self.hosts:
            self.hosts[name] = host_topology(self.rows[name]["cpus"])
        return self.hosts[name]


def run_take(machine: Machine, row: Row) -> None:
    """take_cases: one run of the packed or the distributed algorithm."""
    options = read_options(row)
    packing = Packing(
        spread=options.distribute_cpus_across_cores,
        by_llc=options.prefer_align_cpus_by_uncorecache,
    )
    available = CpuSet.parse(row["available"])
    try:
        if row["algorithm"] == "distributed":
            group = row.get("cpu_group_size") or 1
            got = take_distributed(machine, available, row["num_cpus"], group, packing)
        else:
            got = take_packed(machine, available, row["num_cpus"], packing)
    except AllocError as error:
        expect_error(row, error)
        return
    expect_no_error(row, got)
    expect("CPUs", CpuSet.parse(row["expected"]), got)


def run_order(machine: Machine, row: Row) -> None:
    """order_cases: the ids of free units, or single CPUs, in the accumulator's order."""
    accumulator = Accumulator(machine, CpuSet.parse(row["available"]).bits, 0)
    orders: dict[str, Callable[[], list[int]]] = {
        "sockets": partial(accumulator.free, PACKAGE),
        "numa_nodes": partial(accumulator.free, NODE),
        "cores": partial(accumulator.free, CORE),
        "uncore_caches": partial(accumulator.free, LLC),
        "cpus": accumulator.cpus,
    }
    expected, got = row["expected_ids"], orders[row["kind"]]()
    if not row.get("ordered", True):
        expected, got = sorted(expected), sorted(got)
    expect("ids", expected, got)


def run_accumulator(machine: Machine, row: Row) -> None:
    """accumulator_cases: sets taken one after another, then what is still needed."""
    accumulator = Accumulator(machine, CpuSet.parse(row["available"]).bits, row["num_cpus"])
    for cpus in row["take"]:
        accumulator.take(CpuSet.parse(cpus).bits)
    expect("satisfied", row["satisfied"], accumulator.satisfied)
    expect("failed", row["failed"], accumulator.failed)


def run_start(machine: Machine, row: Row) -> None:
    """Op start: settings and a found state, accepted or refused."""
    try:
        policy = make_policy(machine, row)
    except ConfigError as error:
        expect(f"error ({error})", ("new", True), (row["error_at"], row["error"]))
        return
    try:
        state = policy.start(make_state(row))
    except AllocError as error:
        expect(f"error ({error})", ("start", True), (row["error_at"], row["error"]))
        return
    expect_no_error(row, state.shared)
    expect("shared pool", CpuSet.parse(row["expected_default"]), state.shared)


def run_allocate(machine: Machine, row: Row) -> None:
    """Op allocate: the first container of a pod."""
    policy, before, pod = make_policy(machine, row), make_state(row), read_pod(row["pod"])
    container = next(one for one in pod.containers if one.role is ContainerRole.APP)
    nodes = None if row.get("numa_hint") is None else CpuSet(row["numa_hint"])
    try:
        after = policy.allocate(before, pod, container, nodes)
    except AllocError as error:
        expect_error(row, error)
        return
    got = after.get(pod.uid, container.name)
    expect_no_error(row, got)
    expect("CPUs", CpuSet.parse(row["expected"]) if row["allocated"] else None, got)
    expect_disjoint(after)
    if not row["allocated"]:
        expect("state", before, after)


def run_allocate_all(machine: Machine, row: Row) -> None:
    """Op allocate_all: every container of a pod; which caches they touch."""
    policy, state, pod = make_policy(machine, row), make_state(row), read_pod(row["pod"])
    try:
        for container in pod.containers:
            state = policy.allocate(state, pod, container)
    except AllocError as error:
        expect_error(row, error)
        return
    expect_no_error(row, state.shared)
    expect_disjoint(state)
    apps = [one.name for one in pod.containers if one.role is ContainerRole.APP]
    given = [state.get(pod.uid, name) or EMPTY for name in apps]
    first = row.get("expected_first")
    if first is not None:
        expect("CPUs of the first", read_cpus(first), given[0])
        return
    touched = union(given).bits
    caches = [llc for llc, bits in machine.llcs.items() if bits & touched]
    expect("caches", sorted(row["expected_uncore"]), caches)


def run_pod(machine: Machine, row: Row) -> None:
    """Op pod: init containers first, then the rest; then one container is removed."""
    policy, state, pod = make_policy(machine, row), make_state(row), read_pod(row["pod"])
    for container in pod.containers:
        state = policy.allocate(state, pod, container)
        expect_disjoint(state)
    expect("shared pool", CpuSet.parse(row["expected_after_alloc_default"]), state.shared)
    removed = row.get("remove")
    if removed:
        state = policy.remove(state, pod.uid, removed)
        expected = CpuSet.parse(row["expected_after_remove_default"])
        expect("shared pool after removal", expected, state.shared)
        expect_disjoint(state)


def run_remove(machine: Machine, row: Row) -> None:
    """Op remove: one container of a found state."""
    policy, state = make_policy(machine, row), make_state(row)
    owners = [pod for pod, containers in state.assignments.items() if row["remove"] in containers]
    for pod in owners:
        state = policy.remove(state, pod, row["remove"])
        expect("CPUs of the removed", None, state.get(pod, row["remove"]))
    expect("shared pool", CpuSet.parse(row["expected_default"]), state.shared)
    expect_disjoint(state)


def run_checkpoint(row: Row) -> None:
    """checkpoints: a checkpoint file, restored or refused."""
    restorable = row["checksum_valid"] and not row.get("restore_error")
    try:
        state = parse_checkpoint(row["file"].encode())
    except ParseError as error:
        expect(f"restored ({error})", restorable, False)  # noqa: FBT003 - what was got
        return
    expect("restored", restorable, state.policy == row["configured_policy"])


def run_trace(topology: HostTopology, trace: Row) -> None:
    """traces: what a real kubelet gave to pods that came and went."""
    replay(topology, trace)


def expect_error(row: Row, error: AllocError) -> None:
    """Raise MismatchError unless the row expects an error, of this kind if its text tells."""
    expect(f"error ({error})", row["error"], True)  # noqa: FBT003 - what was got
    text = row.get("error_text", "").lower()
    kinds = [kind for start, kind in ERROR_TEXTS.items() if start in text]
    if kinds:
        expect("kind of error", kinds[0], error.failure)


def expect_no_error(row: Row, got: object) -> None:
    """Raise MismatchError if the row expects an error."""
    if row["error"]:
        raise MismatchError(f"error\n    expected {row.get('error_text')}\n    got      {got}")


def expect_disjoint(state: StaticState) -> None:
    """Raise MismatchError if an exclusive CPU is in the shared pool."""
    expect("exclusive in the shared pool", EMPTY, state.exclusive & state.shared)


def make_policy(machine: Machine, row: Row) -> KubeletStatic:
    """Make the policy that a row is about."""
    reserved = read_cpus(row.get("reserved") or "")
    return KubeletStatic.create(machine, read_options(row), row["num_reserved"], reserved)


def make_state(row: Row) -> StaticState:
    """Make the state that a row begins with."""
    return StaticState(
        shared=CpuSet.parse(row["default"]),
        assignments={
            pod: {name: CpuSet.parse(cpus) for name, cpus in containers.items()}
            for pod, containers in row["assignments"].items()
        },
    )


def read_options(row: Row) -> StaticOptions:
    """Read options written as JSON booleans or as the kubelet's texts."""
    options = row.get("options") or {}
    return StaticOptions.parse({name: str(value).lower() for name, value in options.items()})


def read_cpus(value: str | list[int]) -> CpuSet:
    """Read a cpu list written as text or as numbers."""
    return CpuSet.parse(value) if isinstance(value, str) else CpuSet(value)


def read_pod(pod: Row) -> KubeletPod:
    """Read a pod: init containers come first."""
    first = [read_container(one, ContainerRole.INIT) for one in pod.get("init", [])]
    rest = [read_container(one, ContainerRole.APP) for one in pod.get("containers", [])]
    return KubeletPod(pod["uid"], (*first, *rest))


def read_container(container: Row, role: ContainerRole) -> KubeletContainer:
    """Read a container; an init container that restarts always is a sidecar."""
    policy = container.get("restart_policy", container.get("restartPolicy"))
    if role is ContainerRole.INIT and (policy == "Always" or container.get("restartable")):
        role = ContainerRole.SIDECAR
    request, limit = (milli(container.get(key) or "0") for key in ("request", "limit"))
    return KubeletContainer(container["name"], request, limit, role)


def milli(quantity: str) -> int:
    """Read a CPU quantity, `1500m` or `1.5`, as thousandths, rounded up as Kubernetes does."""
    text = str(quantity)
    exact = Decimal(text[:-1]) if text.endswith("m") else Decimal(text) * 1000
    return int(exact.to_integral_value("ROUND_CEILING"))


SECTIONS: dict[str, Callable[[Machine, Row], None]] = {
    "take_cases": run_take,
    "order_cases": run_order,
    "accumulator_cases": run_accumulator,
}
OPS: dict[str, Callable[[Machine, Row], None]] = {
    "start": run_start,
    "allocate": run_allocate,
    "allocate_all": run_allocate_all,
    "pod": run_pod,
    "remove": run_remove,
}


def load(file: Path) -> Row:
    """Read a file of rows; exit with 2 if that can not be done."""
    try:
        document: Row = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        print(f"oracle: {file}: {error}", file=sys.stderr)
        sys.exit(2)
    return document


def rows(files: list[Path]) -> Iterator[tuple[str, Row, Callable[[], None]]]:
    """Yield each row of the files: the file, the row, and what runs it."""
    topologies = Topologies()
    documents: list[tuple[Path, Row]] = [(file, load(file)) for file in files]
    for file, document in documents:
        topologies.add(document, file)

    def in_topology(run: Callable[[Machine, Row], None], row: Row) -> None:
        run(topologies.machine(row), row)

    for file, document in documents:
        for section, run in SECTIONS.items():
            for row in document.get(section, []):
                yield file.name, row, partial(in_topology, run, row)
        for row in document.get("cases", []):
            yield file.name, row, partial(in_topology, run_case, row)
        for row in document.get("checkpoints", []):
            yield file.name, row, partial(run_checkpoint, row)
        for name, trace in document.get("traces", {}).items():
            yield file.name, {"name": name}, partial(run_trace, topologies.host(trace), trace)


def run_case(machine: Machine, row: Row) -> None:
    """cases: one operation of the static policy."""
    OPS[row["op"]](machine, row)


def main(arguments: list[str]) -> int:
    """Run all rows of the files; return the exit code."""
    if not arguments:
        print("usage: scripts/oracle FILE...", file=sys.stderr)
        return 2
    passed = failed = 0
    for file, row, run in rows([Path(argument) for argument in arguments]):
        try:
            run()
        except Exception as error:  # noqa: BLE001 - one broken row must not hide the others
            failed += 1
            print(f"FAILED {file} {row.get('id', '')} {row.get('name', '')}")
            print(f"  input {json.dumps(row)}")
            why = error if isinstance(error, MismatchError) else traceback.format_exc()
            print(f"  {why}")
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
