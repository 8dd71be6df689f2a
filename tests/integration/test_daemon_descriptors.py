"""VMMs with very many descriptors, and threads that start anew all the time (D23)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from tests.support.daemon import Node, Pod, private_node
from tests.support.hooks import budgets_beside
from tests.support.katalike import KataSandbox
from tests.support.qemu import QEMU, Accelerator, accelerator
from tests.support.specimen import two_cpus
from tests.support.vmm_standin import Spec, copy_of_python, running
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(accelerator() is not Accelerator.KVM, reason="needs KVM's descriptors"),
]

DESCRIPTORS = 1_040_000
"""As many as fs.nr_open allows by default; without CAP_SYS_RESOURCE the hard limit is the bound."""

MANY = 15_000
CALM = 8
HOOKS = 25
HOSTILE = 3
WINDOWS = 4


@contextmanager
def hostile_vmm(node: Node, name: str) -> Iterator[Pod]:
    """Run one in a sandbox, as Kata would start it.

    It says that it has two vCPUs and has one, and no names. The busy thread is where the other one
    would be, so whether that is a vCPU is looked up among the descriptors whenever it is a new one.
    """
    program, sandbox = node.settings["hypervisors"][-1], node.id_of(name)
    argv = (program, "-name", f"sandbox-{sandbox}", "-machine", "q35,accel=kvm", "-smp", "2")
    padding = ("-uuid", "0" * 36, "-nodefaults", "-no-user-config", "-nographic", "-daemonize")
    spec = Spec(
        *(program, (*argv, *padding), ("call_rcu", "vcpu")),
        kvm_ids={"vcpu": 0},
        descriptors=DESCRIPTORS,
        respawns=True,
        nice=19,
    )
    with running(spec) as pid:
        pod = Pod(node, KataSandbox(node.dirs, sandbox))
        pod.kata.pid = pid
        yield pod


@pytest.fixture
def node() -> Iterator[Node]:
    """A node that takes the stand-in for QEMU."""
    with private_node() as node:
        program = copy_of_python(node.root / "bin" / "qemu-system-x86_64")
        node.configure(hypervisors=[QEMU, program])
        yield node


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes for a while."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _is_on(tid: int, cpu: int) -> bool:
    return os.sched_getaffinity(tid) == {cpu}


@pytest.mark.alone
def test_hooks_of_other_pods_keep_their_budget(node: Node) -> None:
    """Every hook of a healthy pod is recorded, and its pins stand, within its budgets.

    A window of hooks that a busy machine loses is measured again; VMMs that hold the daemon up cost
    hooks in each of them.
    """
    first, second = two_cpus()
    count, hostile = 0, list[int]()
    node.start()
    with ExitStack() as end:
        for number in range(HOSTILE):
            many = end.enter_context(hostile_vmm(node, f"many{number}"))
            hostile.append(many.kata.pid)
            count = len(os.listdir(f"/proc/{many.kata.pid}/fd"))
            assert count > MANY, "too few to show anything"
            many.write_bundle(many.id, kind="sandbox")
            many.persist(many.id, None)
            node.hook("createRuntime", many.id, many.kata.pid)
            many.create(f"m{number}", str(second))
            wait_for(partial(_is_on, many.kata.pid, second), "it to be pinned")
        healthy = end.enter_context(node.pod("healthy"))
        healthy.announce()
        late: list[str] = []
        for window in range(WINDOWS):
            with stopped(hostile):
                calm = [healthy.create(f"calm{window}-{n}", str(first)) for n in range(CALM)]
            budgets = budgets_beside(calm)
            names = [f"c{window}-{number}" for number in range(HOOKS)]
            runs = [healthy.create(name, str(first), *budgets) for name in names]
            late = [run.stderr for run in runs if run.stderr]
            worst = max(run.seconds for run in runs)
            print(f"{count} descriptors: {len(late)} of {HOOKS} hooks late, worst {worst:.3f} s")
            if not late:
                break
        assert late == []
        healthy.wait_placed({first})
