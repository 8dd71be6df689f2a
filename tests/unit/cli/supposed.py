"""`what-if` documents as policies answer: served, in the shared pool, refused."""

from typing import Final

from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology
from kata_pin.base.documents.pools import WhatIf
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.supposed import Question, answer, occupied
from tests.support.machines import Shape, host
from tests.unit.cli import documents as docs

HOST: Final[HostTopology] = host(Shape(uppers=2, llcs=2, cores=2).cpus())
"""16 CPUs: 2 packages, each a node with 2 caches of 2 cores; siblings are n and n + 8."""


def supposed(
    policy: str,
    question: Question,
    *,
    taken: CpuSet = EMPTY,
    strict: bool = False,
    on_node: bool = False,
) -> WhatIf:
    """Return the answer about the host, empty or with the grants of docs.allotted()."""
    chosen = create(policy, HOST, Alloc(fail=Fail.STRICT if strict else Fail.BEST_EFFORT))
    document = docs.allotted() if on_node else None
    return answer(chosen, occupied(chosen, document, taken), question)


SERVED = supposed("topology", Question(5500), taken=CpuSet([0, 8, 9]))
POOLED = supposed("annotation", Question(2500, CpuClass.EXCLUSIVE), on_node=True)
FULL = supposed("static", Question(14000), taken=CpuSet([0, 8]), strict=True)
