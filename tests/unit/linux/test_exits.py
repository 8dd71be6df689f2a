"""How long vCPUs were outside their guests, by KVM's tracepoints, and what KVM counts of a VM."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.counters import KvmCounts, MeasuredExits
from kata_pin.base.errors import HostError
from kata_pin.linux import counters
from kata_pin.linux.counters import kvm_counts
from kata_pin.linux.files import HostRoot
from kata_pin.linux.recording import LONG_EXIT_NS, MOST_VCPUS, ExitTimes, exit_names
from tests.support.hosttree import grow

FORMAT = """name: kvm_exit
format:
\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;

print fmt: "vcpu %u reason %s", (REC->isa == 1) ? __print_symbolic(REC->exit_reason & 0xffff, \
{ 12, "HLT" }, { 30, "IO_INSTRUCTION" }) : __print_symbolic(REC->exit_reason, \
{ 0x040 + 14, "PF excp" }, { 0x078, "hlt" }, { -1, "invalid_guest_state" })
"""


def test_an_exit_lasts_until_its_thread_enters_again() -> None:
    """Two vCPUs that take turns on one pCPU are told apart, and so are reasons."""
    times = ExitTimes()
    times.exit(7, 30, 100)
    times.exit(8, 30, 200)
    times.enter(7, 100 + LONG_EXIT_NS)
    times.enter(8, 250)
    times.exit(7, 48, 400_000)
    times.enter(7, 400_010)
    assert set(times.sums()) == {
        MeasuredExits(7, 30, "", 1, LONG_EXIT_NS, LONG_EXIT_NS, 1),
        MeasuredExits(8, 30, "", 1, 50, 50),
        MeasuredExits(7, 48, "", 1, 10, 10),
    }


def test_halts_are_the_guests_own_idle_time() -> None:
    """They are counted apart, whichever number the reason has."""
    times = ExitTimes()
    times.exit(7, 12, 100)
    times.halt(7)
    times.enter(7, 5_000_100)
    times.exit(7, 12, 6_000_000)
    times.enter(7, 6_000_300)
    assert times.sums() == (MeasuredExits(7, 12, "", 1, 300, 300, halts=1, halted_ns=5_000_000),)


def test_what_was_not_seen_whole_does_not_count() -> None:
    """An entry or a halt without an exit, an exit without an entry, and what a loss cut."""
    times = ExitTimes()
    times.enter(7, 100)
    times.halt(7)
    times.exit(7, 1, 200)
    times.halt(7)
    times.forget()
    times.enter(7, 300)
    times.exit(7, 1, 400)
    assert times.sums() == ()


def test_threads_are_bounded() -> None:
    """Whatever runs there, memory is."""
    times = ExitTimes()
    for tid in range(2 * MOST_VCPUS):
        times.exit(tid, 1, 0)
        times.enter(tid, 1)
    assert len(times.sums()) == MOST_VCPUS


@pytest.mark.parametrize(
    ("vendor", "names"),
    [(0, {12: "hlt", 30: "io_instruction"}), (1, {78: "pf excp", 120: "hlt"}), (2, {})],
)
def test_reasons_have_the_names_of_the_hosts_vendor(vendor: int, names: dict[int, str]) -> None:
    """The same number means another thing on Intel's and AMD's CPUs."""
    assert exit_names(FORMAT, vendor) == names


VM = {
    "exits": "90",
    "halt_exits": "5",
    "halt_poll_success_ns": "100",
    "halt_poll_fail_ns": "20",
    "halt_wait_ns": "3000",
}


def test_counters_of_one_vm(tmp_path: Path) -> None:
    """The folder is named after the process that made the VM, and its descriptor."""
    grow(tmp_path, {f"sys/kernel/debug/kvm/42-11/{name}": text for name, text in VM.items()})
    grow(tmp_path, {"sys/kernel/debug/kvm/420-11/exits": "1"})
    assert kvm_counts(HostRoot(str(tmp_path)), 42) == KvmCounts(90, 5, 100, 20, 3000)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"sys/kernel/debug/x": ""}, "with debugfs mounted"),
        ({"sys/kernel/debug/kvm/41-11/exits": "1"}, "a VM of process 42"),
        ({f"sys/kernel/debug/kvm/42-11/{name}": "many" for name in VM}, "invalid literal"),
    ],
)
def test_counters_that_cannot_be_read(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    """Why, and what helps."""
    grow(tmp_path, files)
    with pytest.raises(HostError, match=reason):
        kvm_counts(HostRoot(str(tmp_path)), 42)


def test_a_locked_down_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers EPERM to root (kernel_lockdown(7)), which no right of ours would change."""

    def refuse(_: str) -> bytes:
        raise PermissionError(1, "Operation not permitted")

    grow(tmp_path, {f"sys/kernel/debug/kvm/42-11/{name}": text for name, text in VM.items()})
    monkeypatch.setattr(counters, "read_once", refuse)
    with pytest.raises(HostError, match="locked down"):
        kvm_counts(HostRoot(str(tmp_path)), 42)
