"""Which cpuset each container has in the runtime, which it is to have, and what is to be sent.

A cpuset reaches a container in an answer to the runtime (DESIGN D14). What is decided between two
answers waits for the next, unless it can be pushed (push.py): it is pending, and shown as that.
What was sent counts as delivered until the runtime tells otherwise, or the container's cgroup does
when it is looked at; each connection begins with everything it has. No answer repeats what is being
pushed. A newer cpuset that overtakes it in an answer is sent once more when the push has ended,
whatever the runtime tells before: nobody knows which of the two it made last.

A Kata container without a CPU quota above 0 is never written to: Kata would size its VM by the
cpuset (both runtimes do). One whose new cpuset neither holds the old one nor lies in it gets
both first, so that its threads are on the new CPUs before the old ones go: widen, pin, narrow.
Not those of the old ones that are offline: cgroup v1 refuses a cpuset with one of them (cpuset(7)).

Lifetime: the daemon's; nothing of it needs to survive. Out of scope: the answers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kata_pin.model.alloc import AllocState, Grant, GrantKind
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.nri.replies import Cpuset, Update

Look = Callable[[int], tuple[str, CpuSet]]
"""Returns the cgroup of a process and the CPUs it allows, both empty if it is gone."""


def written(grant: Grant, state: AllocState) -> Cpuset:
    """Return the cpuset that the runtime is to give a container; nothing: it is left as it is.

    A VM's own CPUs, or the housekeeping pool, are part of it beside exclusive ones: Kata confines
    all of QEMU to it (DESIGN D7), and overhead threads need a place there.
    """
    request = grant.request
    kata = request.pod.kata
    if grant.kind is GrantKind.SANDBOX or (kata and (request.quota_us or 0) <= 0):
        return Cpuset()
    home = _overhead_home(grant, state) if kata and grant.exclusive else EMPTY
    return Cpuset(grant.cpus | home, grant.mems)


def _overhead_home(grant: Grant, state: AllocState) -> CpuSet:
    vm = state.get(grant.request.pod.sandbox_id)
    return (vm.exclusive if vm is not None else EMPTY) | state.housekeeping


class Delivery:
    """What the runtime was told to give each container, or has told us that it has."""

    def __init__(self, online: Callable[[], CpuSet] | None = None) -> None:
        """`online` tells the CPUs that are; None: all CPUs of which anybody tells."""
        self._online = online
        self._there: dict[str, Cpuset] = {}
        self._pids: dict[str, int] = {}
        self._under_way: dict[str, Cpuset] = {}
        self._overtaken: set[str] = set()
        self._parting: dict[str, Cpuset] = {}

    def clear(self) -> None:
        """Forget everything: the runtime is about to tell it anew."""
        self._there.clear()
        self._pids.clear()
        self._parting.clear()

    def has(self, container_id: str, cpuset: Cpuset, *, pid: int = 0) -> None:
        """Take note of the cpuset that a container has, as the runtime tells or we answered."""
        there = self._there.get(container_id)
        if cpuset not in (there, self._under_way.get(container_id)):  # somebody else's
            self._parting.pop(container_id, None)
        self._there[container_id] = cpuset
        if pid:
            self._pids[container_id] = pid

    def there(self, container_id: str) -> Cpuset:
        """Return what a container has, nothing if the runtime does not know it."""
        return self._there.get(container_id, Cpuset())

    def part(self, container_id: str, cpuset: Cpuset) -> None:
        """Have a last cpuset sent to a container about which nobody here decides any more.

        Once, and not at all if it gets another one from somebody else or from us before.
        """
        self._parting[container_id] = cpuset

    def parts(self, container_id: str) -> bool:
        """Whether a last cpuset is still to be sent to a container."""
        return container_id in self._parting

    def knows(self, container_id: str) -> bool:
        """Whether the runtime that is connected has told of a container."""
        return container_id in self._there

    def gone(self, container_id: str) -> None:
        """Forget a container."""
        self._there.pop(container_id, None)
        self._pids.pop(container_id, None)
        self._parting.pop(container_id, None)

    def verify(self, state: AllocState, look: Look) -> list[str]:
        """Look at the cgroups of containers; return those that may run where they should not.

        They are updated with the next answer. Not Kata's: their threads are looked at in each pass.
        A cgroup that allows less is no concern: one above it may.
        """
        astray = []
        for container_id, pid in self._pids.items():
            grant = state.get(container_id)
            if grant is None or grant.request.pod.kata:
                continue
            cgroup, cpus = look(pid)
            wanted = written(grant, state).cpus
            if container_id in cgroup and not cpus <= wanted | self._there[container_id].cpus:
                self._there[container_id] = Cpuset(cpus, self._there[container_id].mems)
                astray.append(container_id)
        return astray

    def pending(self, state: AllocState) -> dict[str, Cpuset]:
        """Return what is still to be sent, by container, only those the runtime knows."""
        return dict(self._steps(state))

    def next(self, state: AllocState, *, but: str = "", only: str = "") -> tuple[Update, ...]:
        """Return the updates for an answer, and count them as delivered.

        None of `but`, or of no other container than `only`.
        """
        updates = tuple(
            Update(container_id, cpuset)
            for container_id, cpuset in self._steps(state)
            if container_id != but
            and only in {"", container_id}
            and not self.is_under_way(container_id, cpuset)
        )
        for update in updates:
            name = update.container_id
            self._there[name] = _over(self._there[name], update.cpuset)
            if name in self._under_way:
                self._overtaken.add(name)
            else:
                self._parting.pop(name, None)
        return updates

    @contextmanager
    def under_way(self, container_id: str, cpuset: Cpuset) -> Iterator[None]:
        """Push a cpuset in the block: if that ends well the container has it, else what it had.

        Unless the runtime tells of another meanwhile. What it has is not known where an answer
        has overtaken the push.
        """
        before = self._there.get(container_id)
        self._under_way[container_id] = cpuset
        try:
            yield
            if before is not None and self._there.get(container_id) is before:
                self._there[container_id] = _over(before, cpuset)
                if self._parting.get(container_id) == cpuset:
                    del self._parting[container_id]
        finally:
            del self._under_way[container_id]
            if container_id in self._overtaken and container_id in self._there:
                self._there[container_id] = Cpuset()
            self._overtaken.discard(container_id)

    def is_under_way(self, container_id: str, cpuset: Cpuset) -> bool:
        """Whether this very cpuset is being pushed."""
        return self._under_way.get(container_id) == cpuset

    def _steps(self, state: AllocState) -> list[tuple[str, Cpuset]]:
        """Return what to send, in this order: owners leave CPUs before others come."""
        steps = list(self._unsent(state))
        steps.sort(key=lambda step: self.widens(*step))
        return steps

    def widens(self, container_id: str, cpuset: Cpuset) -> bool:
        """Whether a cpuset has CPUs that a container does not have yet."""
        there = self._there[container_id].cpus
        return bool(there) and not cpuset.cpus <= there  # without any, all CPUs are there

    def _unsent(self, state: AllocState) -> Iterator[tuple[str, Cpuset]]:
        for container_id, there in self._there.items():
            grant = state.get(container_id)
            if grant is None:
                wanted, kata = self._parting.get(container_id, Cpuset()), False
            else:
                wanted, kata = written(grant, state), grant.request.pod.kata
            if wanted and _over(there, wanted) != there:
                yield container_id, self._step(there, wanted) if kata else wanted

    def _step(self, there: Cpuset, wanted: Cpuset) -> Cpuset:
        """Return the first of two steps where a VM needs two, else what is wanted."""
        if there.cpus <= wanted.cpus or wanted.cpus <= there.cpus:
            return wanted
        stay = there.cpus if self._online is None else there.cpus & self._online()
        return Cpuset(stay | wanted.cpus, wanted.mems)


def _over(there: Cpuset, new: Cpuset) -> Cpuset:
    """Return the cpuset after an update: what it leaves empty stays."""
    return Cpuset(new.cpus or there.cpus, new.mems or there.mems)
