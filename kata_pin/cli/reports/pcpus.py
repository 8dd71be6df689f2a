"""The state document seen from the pCPUs: who claims each, which threads may run on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from kata_pin.base.cpuset import CpuPlace, CpuSet
from kata_pin.base.documents.state import Sandbox, State, Thread


class Pcpu(Struct):
    """One online pCPU: the sandboxes that claim it, and the placed threads allowed on it."""

    place: CpuPlace
    exclusive: list[Sandbox] = field(default_factory=list)
    shared: list[Sandbox] = field(default_factory=list)
    threads: list[tuple[Sandbox, Thread]] = field(default_factory=list)
    marks: tuple[str, ...] = ()
    in_default: bool = False

    @property
    def number(self) -> int:
        """The CPU number."""
        return self.place.cpu

    @property
    def idle(self) -> bool:
        """Whether no sandbox has anything to do with it."""
        return not (self.exclusive or self.shared or self.threads)


def parse(text: str | None) -> CpuSet:
    """Return a document's cpu list; nothing is the empty set."""
    return CpuSet.parse(text or "", source="state document")


def view(state: State) -> list[Pcpu]:
    """Return the online pCPUs in topology order, siblings side by side."""
    node = state.node
    isolated, tickless = parse(node.isolated), parse(node.nohz_full)
    kubelet = node.kubelet
    default = parse(kubelet.default) if kubelet and kubelet.policy == "static" else CpuSet()
    ordered = sorted(
        node.cpus,
        key=lambda c: (c.node, c.package, c.llc, c.core, c.thread, c.cpu),
    )
    pcpus = {
        place.cpu: Pcpu(
            place,
            marks=_marks(place, isolated, tickless),
            in_default=place.cpu in default,
        )
        for place in ordered
    }
    for sandbox in state.sandboxes:
        _enter(pcpus, sandbox)
    return list(pcpus.values())


def _marks(place: CpuPlace, isolated: CpuSet, tickless: CpuSet) -> tuple[str, ...]:
    marks = [place.kind] if place.kind else []
    marks += ["isolated"] if place.cpu in isolated else []
    marks += ["nohz_full"] if place.cpu in tickless else []
    return tuple(marks)


def _enter(pcpus: dict[int, Pcpu], sandbox: Sandbox) -> None:
    """Note one sandbox's claims and threads on every pCPU that they concern."""
    exclusive = parse(sandbox.exclusive)
    for cpu in exclusive:
        if cpu in pcpus:
            pcpus[cpu].exclusive.append(sandbox)
    for cpu in parse(sandbox.mask) - exclusive:
        if cpu in pcpus:
            pcpus[cpu].shared.append(sandbox)
    for thread in sandbox.threads:
        if thread.state == "unmanaged" and thread.role != "vcpu":
            continue  # not placed by us: `who` has it, beside every other thread of the host
        for cpu in parse(thread.affinity):
            if cpu in pcpus:
                pcpus[cpu].threads.append((sandbox, thread))


def owning_container(sandbox: Sandbox, cpu: int) -> str:
    """Return the name of the container whose exclusive CPU it is, empty if none is recorded."""
    for container in sandbox.containers:
        if container.state != "deleted" and cpu in parse(container.exclusive):
            return container.name
    return ""


def offline(state: State) -> CpuSet:
    """Return the pCPUs that are present and not online."""
    return parse(state.node.present) - parse(state.node.online)


def by_core(pcpus: Iterable[Pcpu]) -> list[list[Pcpu]]:
    """Return the pCPUs core by core."""
    cores: list[list[Pcpu]] = []
    for pcpu in pcpus:
        if cores and cores[-1][0].place.core == pcpu.place.core:
            cores[-1].append(pcpu)
        else:
            cores.append([pcpu])
    return cores


def numbers(pcpus: Sequence[Pcpu]) -> str:
    """Return the pCPUs' numbers as a cpu list."""
    return str(CpuSet(pcpu.number for pcpu in pcpus))
