"""What the kernel says, compared with what should be and with what kata-pin claims."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kata_pin.base.cpuset import CpuSet
from tests.support.waiting import wait_for


class Claims(Protocol):
    """What kata-pin itself says."""

    def state(self, sandbox_id: str) -> dict[str, Any]:
        """Return what it shows of one sandbox."""


class Sandbox(Protocol):
    """A sandbox whose QEMU tells the truth about itself."""

    @property
    def id(self) -> str:
        """Its id."""

    def vcpus(self) -> dict[int, int]:
        """Return the thread of each vCPU."""

    def tids(self) -> list[int]:
        """Return all threads."""


class Proof:
    """Counts what held and what did not; a bystander process must keep its affinity throughout."""

    def __init__(self, stage: Claims, bystander: int) -> None:
        self._stage = stage
        self._bystander = bystander
        self._before = os.sched_getaffinity(bystander)
        self._held = 0
        self._threads = 0
        self._failures: list[str] = []

    def threads(
        self,
        kata: Sandbox,
        *,
        vcpus: Mapping[int, set[int]],
        others: set[int],
        timed: bool = False,
        claimed: bool = True,
    ) -> None:
        """Check every thread of a sandbox's QEMU.

        `vcpus` maps indexes to where those vCPUs should be, `others` is for every other thread.
        `timed`: it follows at once, and the time is shown; else it holds already. `claimed`:
        kata-pin's own words are compared too.
        """
        started = time.monotonic()
        wrong = self._settled(lambda: self._wrong(kata, vcpus, others), wait=timed)
        took = f" after {(time.monotonic() - started) * 1000:.0f} ms" if timed else ""
        if claimed and not wrong:
            # a pass is shown when it has ended, a moment after the last thread is in its place
            wrong = self._settled(lambda: self._contradictions(kata), wait=True)
        for line in wrong:
            self.failed(f"{kata.id}: {line}")
        if wrong:
            return
        count = len(kata.tids())
        self._threads += count
        placed = ", ".join(f"vCPU {index} on {CpuSet(cpus)}" for index, cpus in vcpus.items())
        rest = f"{'the rest' if vcpus else 'all'} on {CpuSet(others)}"
        text = f"{kata.id}: {count} threads, {placed + ', ' if placed else ''}{rest}{took}"
        self.that(True, f"{text} (read back from the kernel)")
        untouched = os.sched_getaffinity(self._bystander) == self._before
        if not untouched:
            self.failed("a process that is none of the sandbox's was touched")

    def eventually(self, holds: Callable[[], bool], what: str) -> None:
        """Note whether something holds in the end."""
        self.that(not self._settled(lambda: [] if holds() else [what], wait=True), what)

    def _settled(self, look: Callable[[], list[str]], *, wait: bool) -> list[str]:
        """Return what is wrong: at once, or what still is when waiting no longer helps."""
        if not wait:
            return look()
        try:
            wait_for(lambda: not look(), "what should be")
        except TimeoutError:
            return look()
        return []

    def that(self, holds: bool, what: str) -> None:
        """Note whether something holds."""
        if holds:
            self._held += 1
            print(f"   ok  {what}", flush=True)
        else:
            self.failed(what)

    def failed(self, what: str) -> None:
        """Note that something does not hold."""
        self._failures.append(what)
        print(f" FAIL  {what}", flush=True)

    def summary(self, took: str) -> int:
        """Print the end of the story; return the exit status."""
        print(f"\n{self._held} claims held, {len(self._failures)} failed; ", end="")
        print(f"{self._threads} thread affinities read back from the kernel; {took}.")
        for failure in self._failures:
            print(f"  failed: {failure}")
        if not self._failures:
            print("Every thread was where its pod's CPUs are. Nothing was left behind.")
        return 1 if self._failures else 0

    def _wrong(self, kata: Sandbox, vcpus: Mapping[int, set[int]], others: set[int]) -> list[str]:
        """Return a line for each thread that is elsewhere; QEMU says which vCPU is which."""
        truth = kata.vcpus()
        wanted = {tid: vcpus[n] for n, tid in truth.items() if n in vcpus}
        wrong = [f"vCPU {n} is missing" for n in vcpus if n not in truth]
        for tid in kata.tids():
            try:
                affinity = os.sched_getaffinity(tid)
            except ProcessLookupError:
                continue
            if affinity != wanted.get(tid, others):
                should = CpuSet(wanted.get(tid, others))
                wrong.append(f"thread {tid} is on {CpuSet(affinity)}, should be on {should}")
        return wrong

    def _contradictions(self, kata: Sandbox) -> list[str]:
        """Return what `show` claims of each thread against the kernel and QEMU."""
        state = self._stage.state(kata.id)
        threads = {one["tid"]: one for one in state["threads"]}
        found = []
        for index, tid in kata.vcpus().items():
            said = threads.get(tid, {})
            named = said.get("vcpu") in {index, None}
            if not named or said.get("role") not in {"vcpu", "emulator"}:
                found.append(f"vCPU {index} is shown as {said.get('label')}")
        found += [f"thread {tid} is not shown" for tid in kata.tids() if tid not in threads]
        if state["state"] != "ok":
            found.append(f"shown as {state['state']}")
        return found
