"""Our own allocator on a node with many CPUs: containerd's NRI, runc's cgroups, QEMU's threads.

A pod with each policy, changed live, removed; after each step the grants, what NRI was told, the
cgroups and the masks of the threads agree (nodepools.py). containerd before 1.7 has no NRI: then
there is nothing to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.orders import render_orders
from tests.e2e.criruntime import SOCKET, CriNode, kata_handler, qemu_pid
from tests.e2e.idlevm import tids
from tests.e2e.node import Node
from tests.e2e.nodepools import NodePools, cpus, cpuset
from tests.e2e.trespass import Watch
from tests.e2e.unit import Unit

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

ORDERS: Final = Path("/etc/kata-pin/policies")
K1: Final = "shop/k1"
MANY: Final = 20
"""Looks during a change; it takes seconds, a look milliseconds."""
EXCHANGES: Final = 4
EXCHANGED: Final = CpuSet.parse("2-7")


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """containerd with NRI, and minikata as the handler `kata`."""
    if "containerd 1.6" in node.run(["containerd", "--version"]).replace("containerd.io", ""):
        pytest.skip("containerd 1.6 has no NRI")
    with kata_handler(node, tmp_path_factory.mktemp("cri")) as made:
        yield made


@contextlib.contextmanager
def deciding(
    node: Node, unit: Unit, containerd: CriNode, policy: str, **more: Any
) -> Iterator[NodePools]:
    """Have the installed daemon decide cpusets; pods are removed at the end.

    Those of a test that failed were left until it was diagnosed.
    """
    containerd.remove_all()
    alloc = {"policy": policy, "eligibility": "relaxed", "allow": [{"namespace": "*"}], **more}
    pools = NodePools(node, unit, containerd)
    try:
        with unit.restarted_with(alloc=alloc, nri={"enabled": "yes"}):
            node.wait(lambda: pools.allocation()["guarantee"] != "sandboxes only", "NRI", 60)
            yield pools
            containerd.remove_all()
    finally:
        ORDERS.unlink(missing_ok=True)


@pytest.mark.parametrize("policy", ["static", "annotation", "topology"])
def test_a_pod_with_each_policy(node: Node, containerd: CriNode, policy: str) -> None:
    """Created, changed live and back, removed: CPUs of one node leave all others and come back.

    A pod without a quota is there all the time: its VM keeps its vCPUs whatever the pools do.
    """
    unit = Unit(node)
    with deciding(node, unit, containerd, policy) as pools:
        every = pools.allocation()["pools"]["shared"]
        plain = pools.runc("r0")
        free, _ = pools.kata("k0")
        pools.agree("nobody has CPUs of its own")
        assert cpuset(plain) == every
        pod, app = pools.kata("k1", "exclusive", **cpus(2))
        own = _own_of_one_node(pools, app, 2)
        assert cpuset(plain) == str(CpuSet.parse(every) - own)
        pools.agree("k1 created")
        pids = qemu_pid(pod), qemu_pid(free)
        own = _resized(pools, pod, app, own)
        if policy != "static":  # there nobody chooses
            _ordered(pools, app, own)
        _without_a_vm(pools, own)
        assert (qemu_pid(pod), qemu_pid(free)) == pids
        pools.stop(app)
        pools.agree("k1 over", 30, nudging=True)
        assert cpuset(plain) == every
        assert pools.allocation()["pools"]["exclusive"] == ""


def _own_of_one_node(pools: NodePools, container: str, count: int) -> CpuSet:
    """Return the CPUs of its own, so many, of one NUMA node."""
    own = pools.own(container)
    nodes = {one["node"] for one in pools.unit.state()["node"]["cpus"] if one["cpu"] in own}
    assert (len(own), len(nodes)) == (count, 1)
    return own


def _resized(pools: NodePools, pod: str, app: str, own: CpuSet) -> CpuSet:
    """A third CPU with a vCPU for it, near the two, and back to two; others follow each time."""
    pools.resize(pod, app, 3)
    pools.agree("k1 has three CPUs")
    grown = _own_of_one_node(pools, app, 3)
    assert own < grown
    pools.resize(pod, app, 2)
    pools.agree("k1 has two CPUs again", 30, nudging=True)
    assert pools.own(app) < grown
    return _own_of_one_node(pools, app, 2)


def _ordered(pools: NodePools, app: str, own: CpuSet) -> None:
    """Order `share`: others may use the CPUs, with the next answer; then `exclusive` again."""
    (plain, *_) = pools.plain
    _order(pools, CpuClass.SHARE)
    pools.agree("k1 ordered share", 30, nudging=True)
    assert pools.grant(app)["cpus"] == str(own)
    assert own < CpuSet.parse(cpuset(plain))
    _order(pools, CpuClass.EXCLUSIVE)
    pools.agree("k1 ordered exclusive", 30, nudging=True)
    assert pools.own(app) == own
    assert not own & CpuSet.parse(cpuset(plain))


def _order(pools: NodePools, cpu_class: CpuClass) -> None:
    """Order a class for k1; return when the order is in force."""
    ORDERS.write_bytes(render_orders({K1: cpu_class}))
    pools.node.wait(lambda: _classes(pools) == {cpu_class}, f"{K1} to be {cpu_class}", 30)


def _classes(pools: NodePools) -> set[str]:
    grants = pools.allocation()["grants"]
    return {one["cpu_class"] for one in grants if one["pod"] == K1 and one["kind"] == "container"}


def _without_a_vm(pools: NodePools, taken: CpuSet) -> None:
    """A container of runc's has CPUs of its own, beside those of k1, and gives them back."""
    before = [cpuset(one) for one in pools.plain]
    app = pools.runc("r1", "exclusive", **cpus(2))
    assert len(pools.own(app)) == 2
    assert not pools.own(app) & taken
    pools.agree("r1 created")
    assert [cpuset(one) for one in pools.plain[:-1]] != before
    pools.stop(app)
    pools.agree("r1 over", 30, nudging=True)
    assert [cpuset(one) for one in pools.plain] == before


def test_no_others_where_an_owner_still_is(node: Node, containerd: CriNode) -> None:
    """CPUs that k1 gives up while it runs: nobody is there before QEMU's threads have left them.

    With a housekeeping pool: without one a VM's overhead and surplus vCPUs may be on shared CPUs,
    so also on those that have just become shared.
    """
    with deciding(node, Unit(node), containerd, "annotation", housekeeping="14-15") as pools:
        plain = pools.runc("r0")
        free, _ = pools.kata("k0")
        pod, app = pools.kata("k1", "exclusive", **cpus(4))
        pools.agree("k1 created")
        others = {*pools.processes(plain), *pools.threads(free)}
        for count in (3, 2):
            own = pools.own(app)
            with Watch(partial(tids, qemu_pid(pod)), lambda: others, cpus=own) as watch:
                pools.resize(pod, app, count)
                pools.agree(f"k1 has {count}", 30, nudging=True)
            assert watch.lines == []
            assert watch.seen[-1] == own - pools.own(app)
            assert watch.looks > MANY


def test_two_owners_exchange_cpus(node: Node, containerd: CriNode) -> None:
    """What one running VM gives up the other one gets, to and fro, and nobody meets on a CPU.

    Reserved CPUs are never anybody's own: so the two have all others, and what the second one gets
    is what the first one gave. On the way it is shared, and a container of runc's uses it.
    """
    given = {"reserved": "0-1,8-13", "housekeeping": "14-15"}
    with deciding(node, Unit(node), containerd, "annotation", **given) as pools:
        plain = pools.runc("r0")
        giver, taker = (
            pools.kata(name, "exclusive", **cpus(n)) for name, n in (("k1", 4), ("k2", 2))
        )
        pools.agree("both created")
        between = pools.processes(plain)
        for number in range(EXCHANGES):
            had = pools.own(giver[1]), pools.own(taker[1])
            parties = (
                partial(tids, qemu_pid(giver[0])),
                lambda: between,
                partial(tids, qemu_pid(taker[0])),
            )
            with Watch(*parties, cpus=EXCHANGED) as watch:
                pools.resize(*giver, 2)
                pools.agree(f"exchange {number}: given up", 30, nudging=True)
                pools.resize(*taker, 4)
                pools.agree(f"exchange {number}: taken", 30, nudging=True)
            passed = had[0] - pools.own(giver[1])
            assert pools.own(taker[1]) == had[1] | passed
            assert len(passed) == 2
            assert watch.lines == []
            assert passed <= watch.seen[-1]
            assert watch.looks > MANY
            node.tell(
                f"exchange {number} of CPUs {passed}: {watch.looks} looks, nobody met; "
                f"the longest time between two was {watch.longest_s * 1000:.0f} ms"
            )
            giver, taker = taker, giver


def test_others_follow_at_once(node: Node, containerd: CriNode) -> None:
    """With alloc.cri an order changes runc's cgroups though the runtime calls nobody.

    From within the limits of the unit as it is installed.
    """
    with deciding(node, Unit(node), containerd, "annotation", cri=str(SOCKET)) as pools:
        every = pools.allocation()["pools"]["shared"]
        plain = pools.runc("r0")
        pod, app = pools.kata("k1", "exclusive", **cpus(2))
        pools.agree("k1 created")
        rest = cpuset(plain)
        for cpu_class, shared in ((CpuClass.SHARE, every), (CpuClass.EXCLUSIVE, rest)):
            _order(pools, cpu_class)
            pools.agree(f"k1 ordered {cpu_class}")
            assert cpuset(plain) == shared
        assert str(pools.own(app) | CpuSet.parse(rest)) == every
        assert pools.unit.sandbox(pod)["state"] == "ok"
