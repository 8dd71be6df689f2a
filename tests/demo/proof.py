"""What the kernel says, compared with what should be and with what kata-pin claims."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from kata_pin.model.cpuset import CpuSet
from tests.demo.stage import Stage
from tests.support.katalike import KataSandbox


class Proof:
    """Counts what held and what did not; a bystander process must keep its affinity throughout."""

    def __init__(self, stage: Stage, bystander: int) -> None:
        self._stage = stage
        self._bystander = bystander
        self._before = os.sched_getaffinity(bystander)
        self._held = 0
        self._threads = 0
        self._failures: list[str] = []

    def threads(
        self,
        kata: KataSandbox,
        *,
        vcpus: Mapping[int, set[int]],
        others: set[int],
        within_s: float = 0.0,
        claimed: bool = True,
    ) -> None:
        """Check every thread of a sandbox's QEMU.

        `vcpus` maps indexes to where those vCPUs should be, `others` is for every other thread.
        `within_s` is how long it may take; `claimed`: kata-pin's own words are compared too.
        """
        started = time.monotonic()
        while wrong := self._wrong(kata, vcpus, others):
            if time.monotonic() - started > within_s:
                for line in wrong:
                    self.failed(f"{kata.id}: {line}")
                return
            time.sleep(0.005)
        count = len(kata.tids())
        self._threads += count
        took = f" after {(time.monotonic() - started) * 1000:.0f} ms" if within_s else ""
        placed = ", ".join(f"vCPU {index} on {CpuSet(cpus)}" for index, cpus in vcpus.items())
        rest = f"{'the rest' if vcpus else 'all'} on {CpuSet(others)}"
        text = f"{kata.id}: {count} threads, {placed + ', ' if placed else ''}{rest}{took}"
        self.that(True, f"{text} (read back from the kernel)")
        if claimed:
            self._claims(kata)
        untouched = os.sched_getaffinity(self._bystander) == self._before
        if not untouched:
            self.failed("a process that is none of the sandbox's was touched")

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

    def _wrong(
        self, kata: KataSandbox, vcpus: Mapping[int, set[int]], others: set[int]
    ) -> list[str]:
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

    def _claims(self, kata: KataSandbox) -> None:
        """Compare what `show` claims of each thread with the kernel and with QEMU."""
        state = self._stage.state(kata.id)
        threads = {one["tid"]: one for one in state["threads"]}
        for index, tid in kata.vcpus().items():
            said = threads.get(tid, {})
            if said.get("vcpu") not in {index, None} or said.get("role") not in {
                "vcpu",
                "emulator",
            }:
                self.failed(f"{kata.id}: vCPU {index} is shown as {said.get('label')}")
        for tid in kata.tids():
            if tid not in threads:
                self.failed(f"{kata.id}: thread {tid} is not shown")
        if state["state"] != "ok":
            self.failed(f"{kata.id}: shown as {state['state']}")
