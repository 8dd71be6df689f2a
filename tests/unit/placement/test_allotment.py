"""What an allocation means for a pass: grants above records, the VM's CPUs, the pool."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Grant
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, CpuClass, GrantKind
from kata_pin.placement.masks import allot, nothing_allotted, sandbox_mask
from tests.support.allotted import request
from tests.support.world import cpus, node, sandbox

APP = Container("c-db", "s-db", cpus=cpus("0-7"), name="app")
PAUSE = Container("s-db", "s-db", kind=ContainerKind.SANDBOX)
OWN = Grant(request("db", cpus=2), "static", CpuClass.EXCLUSIVE, exclusive=cpus("6-7"))
VM = replace(
    Grant(request("db"), "static", kind=GrantKind.SANDBOX, shared=cpus("1")),
    request=replace(request("db"), container_id="vm:s-db"),
)
STATE = AllocState(CpuSet(range(8))).with_grant(OWN).with_grant(VM)


def test_grants_stand_above_records() -> None:
    """The container has its grant's CPUs, known to be exclusive; the sandbox those of its VM."""
    found = allot((PAUSE, APP), STATE)
    assert [one.cpus for one in found.containers] == [cpus("1"), cpus("6-7")]
    assert (found.allocated, found.pool) == ({"c-db": cpus("6-7")}, cpus("0-5"))


def test_a_pass_believes_the_allocator_first() -> None:
    """The mask is the grant's CPUs, the claim's provenance the allocator."""
    found = allot((PAUSE, APP), STATE)
    mask = sandbox_mask(
        sandbox(*found.containers), node(), allocated=found.allocated, pool=found.pool
    )
    assert (mask.mask, mask.exclusive, mask.overhead_extra) == (
        *(cpus("6-7"), cpus("6-7")),
        cpus("1"),
    )
    assert [str(claim.provenance) for claim in mask.claims] == ["none", "allocator"]


def test_shared_cpus_are_known_not_to_be_exclusive() -> None:
    """A quota that looks exclusive does not count for a grant of shared CPUs."""
    grant = Grant(request("db", cpus=2), "static", shared=cpus("0-1"))
    looks = replace(APP, quota_us=200_000, period_us=100_000)
    found = allot((looks,), AllocState(CpuSet(range(8))).with_grant(grant))
    assert found.allocated == {"c-db": EMPTY}


def test_who_has_no_grant_keeps_his_record() -> None:
    """Containers that the allocator does not know stay as recorded; the pool stands by."""
    found = allot((APP,), AllocState(CpuSet(range(4))))
    assert (found.containers, found.allocated) == ((APP,), {})
    assert found.pool == CpuSet(range(4))
    nothing = nothing_allotted((APP,))
    assert (nothing.containers, nothing.pool) == ((APP,), EMPTY)
