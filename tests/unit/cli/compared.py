"""`alloc-compare` documents: beside what was decided, and beside what a policy would make of it."""

from typing import Final

from kata_pin.base.config.alloc import Alloc
from kata_pin.base.documents.pools import Comparison
from kata_pin.base.placement import KubeletState
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.supposed import as_kubelet, comparison, state_of, taken_over
from tests.support.world import cpus
from tests.unit.cli import documents as docs
from tests.unit.cli.supposed import HOST

KUBELET: Final = KubeletState(
    "static",
    cpus("1,5-7,9,13-15"),
    {"uid-a": {"app": cpus("2-4,10-12")}, "uid-\x1b[31mb": {"db": cpus("0,8")}},
)


def supposed(policy: str, kubelet: KubeletState = KUBELET) -> Comparison:
    """Return the document in which a policy takes over on HOST."""
    ours = taken_over(kubelet, create(policy, HOST, Alloc()))
    return comparison(kubelet, ours, source="/cms", policy=policy, hypothetical=True)


def decided(kubelet: KubeletState = KUBELET) -> Comparison:
    """Return the document beside the grants of docs.allotted()."""
    allocation = docs.allotted().allocation
    assert allocation is not None
    ours = as_kubelet(state_of(allocation))
    return comparison(kubelet, ours, source="/cms", policy="topology", hypothetical=False)


SUPPOSED: Final = supposed("topology")
DECIDED: Final = decided()
