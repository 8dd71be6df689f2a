"""Text of /proc: names that lie, cgroups of all kinds, system calls, descriptors."""

from __future__ import annotations

import os
import threading
import time
import timeit
from pathlib import Path

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.linux import proc

REST = b" S 7 1 1 0 -1 4194560 9 0 0 0 12 34 0 0 20 0 4 0 5678 1 2 3 0 0 0 0 0 0 0 0 0 0 0 0 17 11 "
TAIL = b"0 0 0 55 0 0 0 0 0 0 0 0 0\n"


def stat(comm: bytes) -> bytes:
    return b"4242 (" + comm + b")" + REST + TAIL


def test_stat_fields() -> None:
    """Every field comes from its place in proc_pid_stat(5)."""
    assert proc.parse_stat(stat(b"qemu-system-x86")) == proc.Stat(
        pid=4242,
        comm="qemu-system-x86",
        state="S",
        ppid=7,
        flags=4194560,
        utime=12,
        stime=34,
        starttime=5678,
        processor=11,
    )


@pytest.mark.parametrize(
    ("comm", "shown"),
    [
        pytest.param(b"a b c", "a b c", id="spaces"),
        pytest.param(b"x) R 1 1 (", "x) R 1 1 (", id="brackets"),
        pytest.param(b") S 1 2 3", ") S 1 2 3", id="closing first"),
        pytest.param(b"((((", "((((", id="opening"),
        pytest.param(b"a\nb) R 9", "a\nb) R 9", id="newline"),
        pytest.param(b"", "", id="empty"),
        pytest.param(b"\xff\xfe", "\\xff\\xfe", id="not UTF-8"),
        pytest.param(b"CPU 0/KVM", "CPU 0/KVM", id="QEMU"),
    ],
)
def test_a_name_cannot_shift_the_fields(comm: bytes, shown: str) -> None:
    """A hostile comm changes the name and nothing else."""
    parsed = proc.parse_stat(stat(comm))
    assert parsed.comm == shown
    assert parsed._replace(comm="") == proc.parse_stat(stat(b"x"))._replace(comm="")


def test_stat_of_a_real_thread_with_a_hostile_name() -> None:
    """The kernel's own text of a thread that named itself with brackets and a newline parses."""
    ready, done = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(b"x) R 1\n(0 0")
        ready.set()
        done.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        tid = thread.native_id
        parsed = proc.parse_stat(Path(f"/proc/self/task/{tid}/stat").read_bytes())
        assert (parsed.pid, parsed.comm, parsed.ppid) == (tid, "x) R 1\n(0 0", os.getppid())
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"1 (x", id="cut in the name"),
        pytest.param(b"1 (x) S 1 2", id="cut in the fields"),
        pytest.param(stat(b"x").replace(b"5678", b"abcd"), id="not a number"),
        pytest.param(b"(x) S" + REST, id="no pid"),
        pytest.param(stat(b"x" * 5000), id="too long"),
        pytest.param(stat(b"x").replace(b"5678", b"9" * 4000), id="absurd number"),
    ],
)
def test_stat_that_is_none(data: bytes) -> None:
    """Cut or foreign text is a ParseError that says stat."""
    with pytest.raises(ParseError, match=r"^stat: "):
        proc.parse_stat(data)


def test_parse_stat_is_fast() -> None:
    """parse_stat stays within a few times of what splitting the line costs alone."""
    data = Path("/proc/self/stat").read_bytes()
    number, timer = 200, time.thread_time  # others' time does not count, nor does a cold cache
    floor = min(timeit.repeat(data.split, number=number, repeat=30, timer=timer))
    cost = min(timeit.repeat(lambda: proc.parse_stat(data), number=number, repeat=30, timer=timer))
    assert cost < 5 * floor, f"{cost / number * 1e6:.2f} us, splitting {floor / number * 1e6:.2f}"


@pytest.mark.parametrize(
    ("data", "descriptor"),
    [
        pytest.param(b"16 0x21 0xae80 0x0 0x0 0x0 0x0 0x7ff 0x7fc\n", 0x21, id="KVM_RUN"),
        pytest.param(b"16 0x5 0xaf01 0x0 0x0 0x7ff 0x7fc 0x0 0x0\n", None, id="vhost"),
        pytest.param(b"271 0x5605ecce1400 0x50 0x0 0x0 0x8 0x0 0x7 0x7\n", None, id="ppoll"),
        pytest.param(b"-1 0x7ffe 0x7f00\n", None, id="not in a call"),
        pytest.param(b"16\n", None, id="no arguments"),
    ],
)
def test_syscall(data: bytes, descriptor: int | None) -> None:
    """Only ioctl(fd, KVM_RUN) names a vCPU's descriptor."""
    parsed = proc.parse_syscall(data)
    assert parsed is not None
    assert parsed.kvm_run_fd() == descriptor


def test_syscall_running() -> None:
    """A thread on a CPU has no system call to show: ask again."""
    assert proc.parse_syscall(b"running\n") is None


def test_syscall_numbers_differ_by_machine() -> None:
    """ioctl is number 29 on arm64, and 16 there is another call."""
    parsed = proc.parse_syscall(b"29 0x9 0xae80 0x0\n")
    assert parsed is not None
    assert (parsed.kvm_run_fd("aarch64"), parsed.kvm_run_fd("x86_64")) == (9, None)
    assert parsed.kvm_run_fd("vax") is None


@pytest.mark.parametrize("data", [b"", b"\n", b"sleeping\n", b"16 21 xyz\n", b"1_6 0x1\n"])
def test_syscall_that_is_none(data: bytes) -> None:
    """Foreign text is a ParseError."""
    with pytest.raises(ParseError, match=r"^syscall: "):
        proc.parse_syscall(data)


def test_cgroup_v2() -> None:
    """One line, no controllers: the cpuset follows the unified hierarchy."""
    groups = proc.parse_cgroup(b"0::/kubepods.slice/cri-containerd-abc.scope\n")
    assert groups.cpuset == groups.unified
    assert groups.paths == ("/kubepods.slice/cri-containerd-abc.scope",)


def test_cgroup_v1() -> None:
    """The cpuset controller's own line counts; a named hierarchy has one controller."""
    groups = proc.parse_cgroup(b"5:cpuset,cpu:/katalab/kata_p1\n2:name=systemd:/init.scope\n")
    assert groups.unified is None
    assert groups.cpuset == proc.CgroupEntry(5, ("cpuset", "cpu"), "/katalab/kata_p1")


def test_cgroup_hybrid() -> None:
    """With v1 cpuset beside v2, v1 is what limits; without, v2."""
    both = proc.parse_cgroup(b"3:cpuset:/a\n1:name=systemd:/s\n0::/u\n")
    assert both.cpuset is not None
    assert both.cpuset.path == "/a"
    unified = proc.parse_cgroup(b"1:name=systemd:/s\n0::/u\n")
    assert unified.cpuset is not None
    assert unified.cpuset.path == "/u"


def test_cgroup_path_with_colons_and_removed() -> None:
    """Kata makes paths with colons; a removed cgroup is marked."""
    groups = proc.parse_cgroup(b"0::/machine.slice:kata:p1 (deleted)\n")
    assert groups.entries == (proc.CgroupEntry(0, (), "/machine.slice:kata:p1", removed=True),)


@pytest.mark.parametrize("data", [b"0:/\n", b"x::/\n", b"0::relative\n", b"junk\n", b"-1::/\n"])
def test_cgroup_that_is_none(data: bytes) -> None:
    """A line that is not hierarchy:controllers:path is a ParseError."""
    with pytest.raises(ParseError, match=r"^cgroup: "):
        proc.parse_cgroup(data)


@pytest.mark.parametrize(
    ("path", "yes"),
    [
        pytest.param("/katalab/kata_p1", True, id="Kata's name"),
        pytest.param("/kata_overhead/p1", True, id="element"),
        pytest.param("/machine.slice:kata:p1", True, id="slice:prefix:name"),
        pytest.param("/kubepods.slice/cri-containerd-p1.scope", True, id="systemd scope"),
        pytest.param("/p1/sub", True, id="above"),
        pytest.param("/katalab/kata_p10", False, id="longer id"),
        pytest.param("/katalab/kata_p1.x", False, id="id goes on"),
        pytest.param("/katalab/web-p1", False, id="id ends another's"),
        pytest.param("/kubepods.slice/web-p1.scope", False, id="scope of another"),
        pytest.param("/katalab/xp1", False, id="id starts earlier"),
        pytest.param("/", False, id="root"),
    ],
)
def test_cgroup_names_a_sandbox(path: str, *, yes: bool) -> None:
    """An id counts as a whole element, as `kata_<id>`, and in a scope, never as a part."""
    assert proc.parse_cgroup(f"0::{path}\n".encode()).names("p1") is yes


def test_cgroup_names_nothing() -> None:
    """The empty id is in no path."""
    assert not proc.parse_cgroup(b"0::/\n").names("")


def test_cmdline() -> None:
    """Arguments end in NUL; empty ones in the middle count."""
    assert proc.parse_cmdline(b"qemu\0-name\0\0x\0") == ("qemu", "-name", "", "x")
    assert proc.parse_cmdline(b"") == ()
    assert proc.parse_cmdline(b"title without end") == ("title without end",)
    with pytest.raises(ParseError, match=r"^cmdline: longer"):
        proc.parse_cmdline(b"a" * (proc.MAX_CMDLINE + 1))


@pytest.mark.parametrize(
    ("target", "vcpu"),
    [
        ("anon_inode:kvm-vcpu:0", 0),
        ("anon_inode:kvm-vcpu:15", 15),
        ("anon_inode:kvm-vcpu-stats:0", None),
        ("anon_inode:kvm-vcpu:0 (deleted)", None),
        ("anon_inode:kvm-vcpu:", None),
        ("anon_inode:kvm-vcpu:1\n", None),
        ("anon_inode:kvm-vcpu:-1", None),
        ("anon_inode:kvm-vcpu:999999", None),
        ("/tmp/anon_inode:kvm-vcpu:1", None),
        ("anon_inode:kvm-vm", None),
    ],
)
def test_vcpu_of_link(target: str, vcpu: int | None) -> None:
    """Only the exact form of a vCPU's descriptor counts."""
    assert proc.vcpu_of_link(target) == vcpu


def test_executables() -> None:
    """Numbers, and a path in which anything may stand."""
    found = proc.parse_exe(b"2049 77 0 100755\n/usr/bin/qemu-system-x86_64 (deleted)")
    assert found == proc.ExeFile("/usr/bin/qemu-system-x86_64", True, 2049, 77, 0, 0o100755)
    assert proc.parse_exe(b"1 2 3 4\n/a\n (deleted) b").path == "/a\n (deleted) b"
    for data in (b"", b"1 2 3 4", b"1 2 3\n/a", b"1 2 3 9\n/a", b"-1 2 3 4\n/a", b"1" * 30 + b"\n"):
        with pytest.raises(ParseError):
            proc.parse_exe(data)
