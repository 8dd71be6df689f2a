"""Who owns each exclusive pCPU, and whose every thread is, by the state document."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.documents.state import Sandbox, State, Thread
from kata_pin.cli.reports import pcpus
from kata_pin.placement.owners import Known, Owner


def owners(state: State, about: Container[str] | None = None) -> list[Owner]:
    """Return an owner for each exclusive pCPU, by number; of two sandboxes that claim it, both.

    `about` are the ids of the sandboxes that matter; None: all.
    """
    found = [
        Owner(
            *(cpu, one.id, one.pod, pcpus.owning_container(one, cpu), _placed(one, cpu)),
            frozenset(_alone(one, cpu)),
        )
        for one in state.sandboxes
        if about is None or one.id in about
        for cpu in pcpus.parse(one.exclusive)
    ]
    return sorted(found, key=lambda owner: (owner.cpu, owner.sandbox))


def _placed(sandbox: Sandbox, cpu: int) -> dict[int, str]:
    """Return the threads that are placed on a pCPU, with their labels."""
    return {thread.tid: thread.label for thread in sandbox.threads if cpu in _place(thread)}


def _alone(sandbox: Sandbox, cpu: int) -> Iterator[int]:
    """Yield the threads that may run on this pCPU only."""
    for thread in sandbox.threads:
        if _place(thread) == CpuSet([cpu]):
            yield thread.tid


def _place(thread: Thread) -> CpuSet:
    """Return a thread's pCPUs; of a vCPU that others pin, as Kata can, where it may run."""
    if thread.expected is None and thread.role == "vcpu":
        return pcpus.parse(thread.affinity)
    return pcpus.parse(thread.expected)


def known(state: State) -> Known:
    """Return whose each thread, process and container is."""
    threads = [(thread, one.id) for one in state.sandboxes for thread in one.threads]
    containers = {c.id: one.id for one in state.sandboxes for c in one.containers}
    return Known(
        threads={thread.tid: sandbox for thread, sandbox in threads},
        processes={thread.tgid: sandbox for thread, sandbox in threads},
        containers=containers | {one.id: one.id for one in state.sandboxes},
        pods={one.id: one.pod for one in state.sandboxes},
        masks={one.id: pcpus.parse(one.mask) for one in state.sandboxes},
    )


def free(state: State) -> CpuSet:
    """Return the online pCPUs that no container has exclusively, with a VM or without."""
    taken: Iterable[str] = (state.node.assigned, *(one.exclusive for one in state.sandboxes))
    if state.allocation is not None:
        taken = (*taken, *(one.cpus for one in state.allocation.holders))
    return pcpus.parse(state.node.online) - union(map(pcpus.parse, taken))
