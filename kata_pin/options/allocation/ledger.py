"""The ledger of containers: what each one requests, which cpuset it has, and what is pending.

A cpuset, with the limits that were decided beside it, reaches a container in an answer to the
runtime (D14), or is pushed between two answers (push.py); until then it is pending. What was sent
in an answer counts as confirmed until the runtime reports otherwise, or an audit finds another
cpuset in the container's cgroup. Each connection begins with everything the runtime reports. No
answer repeats the cpuset that is being pushed. If an answer carries a newer one meanwhile, or the
runtime reports another, it is unknown which of the two was applied last: the newest is sent again
when the push has ended.

A Kata container without a CPU quota above 0 never gets a cpuset: both Kata runtimes size
a VM by its cpuset then. If a Kata container's new cpuset neither contains the old one nor lies
within it, both are sent first, so that the VM's threads are on the new CPUs before the old ones go:
widen, pin, narrow. Offline CPUs of the old cpuset are left out: cgroup v1 refuses them (cpuset(7)).

Failed pushes are retried, later each time. A hung container takes the whole deadline of a push, and
containerd creates no container meanwhile; so after a slow push all slow containers rest for many
times as long as it took. Fast containers, and new ones, do not wait for them.

Lifetime: the daemon's; nothing of it survives a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant
from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.values import GrantKind
from kata_pin.peers.nri.messages import MAX_CONTAINERS
from kata_pin.peers.nri.replies import Cpuset, Update

RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the next try, by the number of failures; the last one for ever."""

SLOW_S: Final = 2.0
"""A push that takes longer is slow; a healthy container takes some ten milliseconds."""

REST: Final = 20
"""Slow containers rest for this many times the duration of a push: they get 1/20 of the time."""

LONGEST_REST_S: Final = 600.0
"""Longest rest that grows: it doubles each time that a container is slow again."""

NOTHING: Final = Cpuset()

Look = Callable[[int | str], tuple[str, CpuSet]]
"""Returns the cgroup of a process, or of a sandbox's VM, and its CPUs; both empty if unknown."""


class RetryState(Struct, frozen=True):
    """Failed tries in a row to send `cpuset`, and when to try again (CLOCK_MONOTONIC).

    `problem` is empty for a container that is only put off: the runtime does not know it (it is
    about to end), there was no runtime, or it reported another cpuset meanwhile. `slow` counts slow
    pushes in a row.
    """

    tries: int = 0
    not_before: float = 0.0
    problem: str = ""
    cpuset: Cpuset = NOTHING
    slow: int = 0

    def failed(self, problem: str, cpuset: Cpuset, now: float) -> RetryState:
        """Return the state after one more failure; another cpuset starts from the first delay."""
        tries = self.tries + 1 if self.cpuset == cpuset else 1
        delay_s = RETRY_S[min(tries, len(RETRY_S)) - 1]
        return RetryState(tries, now + delay_s, problem, cpuset, self.slow)


NO_FAILURE: Final = RetryState()


class LedgerEntry(Struct, frozen=True):
    """What is known of one container.

    `request` is None until the runtime reports what the container requests. `left_alone`: another
    plugin decides its cpuset. `ran`: it has, or had, a process. `confirmed` is the cpuset that it
    has, as reported or answered; None: the connected runtime has not reported the container.
    `final` is a last cpuset to be sent although nothing is decided for the container any more
    (push.py).
    """

    request: ContainerRequest | None = None
    sandbox_id: str = ""
    left_alone: bool = False
    pid: int = 0
    ran: bool = False
    confirmed: Cpuset | None = None
    final: Cpuset | None = None
    retry: RetryState = NO_FAILURE


def cpuset_for(grant: Grant, state: AllocState) -> Cpuset:
    """Return the cpuset that the runtime is to give a container; empty: it is left as it is.

    Beside exclusive CPUs it contains the VM's own CPUs or the housekeeping pool: Kata confines all
    of QEMU to it (D7), and overhead threads need a place there.
    """
    request = grant.request
    kata = request.pod.kata
    if grant.kind is GrantKind.SANDBOX or (kata and (request.quota_us or 0) <= 0):
        return Cpuset(limits=grant.limits)
    overhead = EMPTY
    if kata and grant.exclusive:
        vm = state.get(request.pod.sandbox_id)
        overhead = (vm.exclusive if vm is not None else EMPTY) | state.housekeeping
    return Cpuset(grant.cpus | overhead, grant.mems, grant.limits)


class Ledger:
    """All containers of the node that a runtime has reported, by id."""

    def __init__(
        self, clock: Callable[[], float], online: Callable[[], CpuSet] | None = None
    ) -> None:
        """`clock` is CLOCK_MONOTONIC, in seconds.

        `online` returns the CPUs that are online now; None: all CPUs that anybody reports.
        """
        self.changed = asyncio.Event()
        """Something may be pending: the pusher looks soon."""
        self.woken = asyncio.Event()
        """The same for those who write placements."""
        self.tried = asyncio.Event()
        """Everything that was pending has been tried."""
        self.is_connected = False
        """Whether a runtime reports every container of the node."""
        self._clock = clock
        self._online = online
        self._entries: dict[str, LedgerEntry] = {}
        self._pushed: tuple[str, Cpuset] | None = None
        self._overtaken = False
        self._slow_until = 0.0

    def wake(self) -> None:
        """Have the pusher look soon whether anything is pending."""
        self.changed.set()
        self.woken.set()
        self.tried.clear()

    # ---- what the runtime reports --------------------------------------------------------

    def get(self, container_id: str) -> LedgerEntry | None:
        """Return a container's entry."""
        return self._entries.get(container_id)

    def requested(self, request: ContainerRequest, sandbox_id: str) -> None:
        """Record what a container requests."""
        self._update(request.container_id, request=request, sandbox_id=sandbox_id)

    def reported(
        self, container_id: str, cpuset: Cpuset, *, pid: int = 0, runs: bool = False
    ) -> None:
        """Record the cpuset that a container has. Another than we sent ends a restore."""
        entry = self._entries.get(container_id, LedgerEntry())
        name, sent = self._pushed or ("", NOTHING)
        pushed = name == container_id and sent.over(cpuset) == cpuset
        self._overtaken |= not pushed and name == container_id
        final = entry.final if pushed or cpuset.confined_as(entry.confirmed) else None
        ran = runs or entry.ran
        self._update(container_id, confirmed=cpuset, pid=pid or entry.pid, ran=ran, final=final)

    def leave_alone(self, container_id: str) -> None:
        """Record that another plugin decides about a container."""
        entry = self._entries.get(container_id)
        if entry is not None and entry.request is not None:
            self._update(container_id, left_alone=True)

    def ended(self, container_id: str) -> bool:
        """Forget a container; return whether it has had a process."""
        entry = self._entries.pop(container_id, None)
        return entry is not None and entry.ran

    def disconnected(self) -> None:
        """Forget what the runtime reported; it will report again. Slow containers stay slow."""
        self.is_connected = False
        self._entries = {
            name: LedgerEntry(retry=RetryState(slow=entry.retry.slow))
            for name, entry in self._entries.items()
            if entry.retry.slow
        }

    def connected(self) -> None:
        """Record that the runtime has reported everything: others are forgotten."""
        self.is_connected = True
        self._entries = {
            name: entry for name, entry in self._entries.items() if entry.confirmed is not None
        }

    def knows(self, container_id: str) -> bool:
        """Whether the connected runtime has reported a container."""
        return self._confirmed(container_id) is not None

    def requests(self) -> Iterator[tuple[ContainerRequest, str, Cpuset]]:
        """Yield request, sandbox and cpuset of containers that are not left to another plugin."""
        for entry in self._entries.values():
            if entry.request is not None and not entry.left_alone:
                yield entry.request, entry.sandbox_id, entry.confirmed or NOTHING

    def others(self) -> Iterator[tuple[ContainerRequest, CpuSet]]:
        """Yield request and CPUs of containers whose cpuset is another plugin's."""
        for entry in self._entries.values():
            if entry.request is not None and entry.left_alone and entry.confirmed:
                yield entry.request, entry.confirmed.cpus

    def of_sandbox(self, sandbox_id: str) -> list[str]:
        """Return the ids of a sandbox's containers."""
        return [name for name, one in self._entries.items() if one.sandbox_id == sandbox_id]

    # ---- what is to be sent --------------------------------------------------------------

    def restore(self, container_id: str, cpuset: Cpuset) -> None:
        """Have a last cpuset sent, once; not at all if the container gets another one before."""
        self._update(container_id, final=cpuset)

    def is_restoring(self, container_id: str) -> bool:
        """Whether a last cpuset is still to be sent to a container."""
        entry = self._entries.get(container_id)
        return entry is not None and entry.final is not None

    def pending(self, state: AllocState) -> dict[str, Cpuset]:
        """Return what is still to be sent, by container: narrowed cpusets before widened ones."""
        steps = list(self._unsent(state))
        steps.sort(key=lambda step: self.widens(*step))
        return dict(steps)

    def updates(self, state: AllocState, *, but: str = "", only: str = "") -> tuple[Update, ...]:
        """Return the updates for an answer, and count them as confirmed.

        None for the container `but`, and where `only` is given for no other than that.
        """
        updates = tuple(
            Update(name, cpuset)
            for name, cpuset in self.pending(state).items()
            if name != but and only in {"", name} and not self.is_pushed(name, cpuset)
        )
        for name, cpuset in ((one.container_id, one.cpuset) for one in updates):
            entry = self._entries[name]
            overtakes = self._pushed is not None and self._pushed[0] == name
            self._overtaken |= overtakes
            final = entry.final if overtakes else None
            self._update(name, confirmed=cpuset.over(entry.confirmed or NOTHING), final=final)
        return updates

    def widens(self, container_id: str, cpuset: Cpuset) -> bool:
        """Whether a cpuset has CPUs that a container does not have yet."""
        confirmed = self._confirmed(container_id) or NOTHING
        return bool(confirmed.cpus) and not cpuset.cpus <= confirmed.cpus  # none set: all CPUs

    def misplaced(self, state: AllocState, look: Look) -> list[str]:
        """Return containers whose cgroups allow more CPUs than was sent: they are pending again."""
        found: dict[str, Cpuset] = {}
        for name, entry in self._entries.items():
            grant, has = state.get(name), entry.confirmed
            if grant is None or has is None:
                continue
            place: int | str = entry.pid
            owner, together = name, [name]
            if grant.request.pod.kata:  # those with a cpuset share the cgroup of their VM
                place = owner = entry.sandbox_id if entry.ran and has.cpus else ""
                together = self.of_sandbox(owner)
            cgroup, cpus = look(place) if place else ("", EMPTY)
            if owner in cgroup and not cpus <= union(self._sent(one, state) for one in together):
                found[name] = replace(has, cpus=cpus)
        for name, cpuset in found.items():
            self._update(name, confirmed=cpuset)
        return list(found)

    def _sent(self, container_id: str, state: AllocState) -> CpuSet:
        grant, has = state.get(container_id), self._confirmed(container_id) or NOTHING
        return has.cpus | (cpuset_for(grant, state).cpus if grant is not None else EMPTY)

    # ---- pushing -------------------------------------------------------------------------

    @contextmanager
    def pushing(self, container_id: str, cpuset: Cpuset) -> Iterator[None]:
        """Push a cpuset in the block; confirmed if that ends well and the runtime reported nothing.

        One at a time. If an answer or a report of another cpuset came meanwhile, what the container
        has is unknown.
        """
        before = self._confirmed(container_id)
        self._pushed, self._overtaken = (container_id, cpuset), False
        try:
            yield
            if before is not None and self._confirmed(container_id) is before:
                final = self._entries[container_id].final
                self._update(
                    container_id,
                    confirmed=cpuset.over(before),
                    final=None if final == cpuset else final,
                )
        finally:
            self._pushed = None
            if self._overtaken and self.knows(container_id):
                self._update(container_id, confirmed=Cpuset())

    def is_pushed(self, container_id: str, cpuset: Cpuset) -> bool:
        """Whether this very cpuset is being pushed."""
        return self._pushed == (container_id, cpuset)

    def due(
        self, state: AllocState, *, not_before: float = 0.0
    ) -> tuple[tuple[str, Cpuset] | None, float | None]:
        """Return the container and cpuset to push now, and when the next one is due; None: never.

        Another cpuset than the one that failed is due at once, but nothing is `not_before`. First
        comes the container that never failed, last the slow one.
        """
        pending = self.pending(state)
        self.forget_failures(but=pending)
        due_at = {name: max(not_before, self._due_at(name, pending[name])) for name in pending}
        next_at = min(due_at.values(), default=None)
        if next_at is None or next_at > self._clock():
            return None, next_at
        now = self._clock()
        first = min((name for name in pending if due_at[name] <= now), key=self._precedence)
        return (first, pending[first]), next_at

    def failed(self, container_id: str, cpuset: Cpuset, problem: str = "") -> None:
        """Record that a push failed; without a `problem` the container is only put off."""
        entry = self._entries.get(container_id)
        if entry is not None:
            self._update(container_id, retry=entry.retry.failed(problem, cpuset, self._clock()))

    def took(self, container_id: str, seconds: float) -> None:
        """Record how long a push took, whatever its result."""
        entry = self._entries.get(container_id, LedgerEntry())
        slow = entry.retry.slow + 1 if seconds > SLOW_S else 0
        if slow:
            now, least = self._clock(), REST * seconds
            until = max(self._slow_until, now) + least * 2 ** min(slow - 1, 10)
            self._slow_until = min(until, now + max(LONGEST_REST_S, least))
        if slow != entry.retry.slow and container_id in self._entries:
            self._update(container_id, retry=replace(entry.retry, slow=slow))

    def forget_failures(self, but: dict[str, Cpuset] | None = None) -> None:
        """Forget failures of all containers but these; slow ones stay slow."""
        for name, entry in list(self._entries.items()):
            if entry.retry.tries and name not in (but or {}):
                self._update(name, retry=RetryState(slow=entry.retry.slow))

    @property
    def problems(self) -> dict[str, str]:
        """Why containers could not be changed at the last try, by id."""
        return {name: x.retry.problem for name, x in self._entries.items() if x.retry.problem}

    def slow_until(self, container_id: str) -> float:
        """Return when a container may be pushed, by the clock; 0 for one that is not slow."""
        entry = self._entries.get(container_id)
        return self._slow_until if entry is not None and entry.retry.slow else 0.0

    def _due_at(self, container_id: str, cpuset: Cpuset) -> float:
        retry = self._entries[container_id].retry
        return max(
            retry.not_before if retry.cpuset == cpuset else 0.0, self.slow_until(container_id)
        )

    def _precedence(self, container_id: str) -> tuple[bool, float]:
        retry = self._entries[container_id].retry
        return retry.slow > 0, retry.not_before

    # ---- parts ---------------------------------------------------------------------------

    def _update(self, container_id: str, **fields: object) -> None:
        """Change an entry; a new one is kept unless there are too many."""
        entry = self._entries.get(container_id)
        if entry is not None or len(self._entries) < MAX_CONTAINERS:
            self._entries[container_id] = replace(entry or LedgerEntry(), **fields)

    def _confirmed(self, container_id: str) -> Cpuset | None:
        entry = self._entries.get(container_id)
        return None if entry is None else entry.confirmed

    def _unsent(self, state: AllocState) -> Iterator[tuple[str, Cpuset]]:
        for name, entry in self._entries.items():
            if entry.confirmed is None:
                continue
            grant = state.get(name)
            if grant is None:
                wanted, kata = entry.final or NOTHING, False
            else:
                wanted, kata = cpuset_for(grant, state), grant.request.pod.kata
            if wanted and wanted.over(entry.confirmed) != entry.confirmed:
                yield name, self._step(entry.confirmed, wanted) if kata else wanted

    def _step(self, confirmed: Cpuset, wanted: Cpuset) -> Cpuset:
        """Return the first of two steps where a VM needs two, else what is wanted."""
        if confirmed.cpus <= wanted.cpus or wanted.cpus <= confirmed.cpus:
            return wanted
        stay = confirmed.cpus if self._online is None else confirmed.cpus & self._online()
        return replace(wanted, cpus=stay | wanted.cpus)
