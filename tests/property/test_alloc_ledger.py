"""The ledger under answers, pushes, reports and reconnections in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Grant
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import KataPinError
from kata_pin.options.allocation.ledger import Ledger
from kata_pin.peers.nri.replies import Cpuset
from tests.support.allotted import request

NAMES = st.sampled_from(["c-runc", "c-kata", "c-bare"])
REQUESTS = {
    "c-runc": request("runc", kata=False),
    "c-kata": request("kata", cpus=2),
    "c-bare": request("bare", cpus=2, quota=False),
}
CPUS = st.sets(st.integers(0, 3), min_size=1).map(CpuSet)


class Runtime(RuleBasedStateMachine):
    """A runtime with three containers, and the cpusets that it has for them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(lambda: 0.0)
        self.state = AllocState(CpuSet(range(4)))
        self.has: dict[str, CpuSet] = {}

    @rule(name=NAMES, cpus=CPUS)
    def decide(self, name: str, cpus: CpuSet) -> None:
        """A policy gives a container other CPUs."""
        grant = Grant(REQUESTS[name], "test", shared=cpus)
        self.state = self.state.with_grant(grant)

    @rule(name=NAMES, cpus=CPUS)
    def report(self, name: str, cpus: CpuSet) -> None:
        """The runtime reports a container, which another program may have changed."""
        self.has[name] = cpus
        self.ledger.requested(REQUESTS[name], f"s-{name}")
        self.ledger.reported(name, Cpuset(cpus))

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        """A container ends."""
        self.has.pop(name, None)
        self.ledger.ended(name)

    @rule()
    def answer(self) -> None:
        """An answer to the runtime carries what is pending."""
        self.apply_updates()

    @rule(fails=st.booleans(), overtaken=st.booleans(), reported=st.booleans())
    @precondition(lambda self: self.ledger.pending(self.state))
    def push(self, *, fails: bool, overtaken: bool, reported: bool) -> None:
        """The first pending cpuset is pushed; meanwhile an answer or a report may come."""
        name, cpuset = next(iter(self.ledger.pending(self.state).items()))
        try:
            with self.ledger.pushing(name, cpuset):
                if overtaken:
                    grant = self.state.grants[name]
                    self.state = self.state.with_grant(replace(grant, shared=CpuSet([3])))
                    self.apply_updates()
                if reported:
                    self.ledger.reported(name, Cpuset(self.has[name]))
                if fails:
                    raise KataPinError("no answer")
                self.has[name] = cpuset.cpus
        except KataPinError:
            self.ledger.failed(name, cpuset, "no answer")

    @rule()
    def reconnect(self) -> None:
        """The runtime goes away, and reports everything again."""
        self.ledger.disconnected()
        assert self.ledger.pending(self.state) == {}
        for name, cpus in self.has.items():
            self.ledger.requested(REQUESTS[name], f"s-{name}")
            self.ledger.reported(name, Cpuset(cpus))
        self.ledger.connected()

    def apply_updates(self) -> None:
        for update in self.ledger.updates(self.state):
            assert not self.ledger.is_pushed(update.container_id, update.cpuset)
            self.has[update.container_id] = update.cpuset.cpus

    @invariant()
    def only_what_may_be_sent_is_pending(self) -> None:
        """Containers of the runtime with a grant, and no Kata container without a quota."""
        pending = self.ledger.pending(self.state)
        assert pending.keys() <= self.has.keys() & self.state.grants.keys() - {"c-bare"}
        assert set(self.ledger.problems) <= self.has.keys()

    @invariant()
    def what_is_not_pending_is_there(self) -> None:
        """Every other container with a grant has its cpuset, whatever has happened."""
        pending = self.ledger.pending(self.state)
        for name in self.has.keys() & self.state.grants.keys() - pending.keys() - {"c-bare"}:
            assert self.has[name] == self.state.grants[name].cpus

    @invariant()
    def two_answers_are_enough(self) -> None:
        """A VM needs two, to widen and to narrow; nothing is pending then."""
        ledger = Ledger(lambda: 0.0)
        for name, cpus in self.has.items():
            ledger.reported(name, Cpuset(cpus))
        for _ in range(2):
            ledger.updates(self.state)
        assert ledger.pending(self.state) == {}


def test_any_order() -> None:
    """Cpusets are never lost, whatever happens in which order."""
    run_state_machine_as_test(
        Runtime, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )


def test_a_report_of_the_old_cpuset_during_a_push() -> None:
    """The push may be applied after it: what the container has is not known, and is sent again."""
    run = Runtime()
    run.report(name="c-kata", cpus=CpuSet([3]))
    run.decide(name="c-kata", cpus=CpuSet([0]))
    run.push(fails=False, overtaken=True, reported=True)
    run.what_is_not_pending_is_there()
