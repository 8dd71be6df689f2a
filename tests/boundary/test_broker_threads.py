"""The broker through its socket: whose threads, descriptors and memory it touches, and tunables."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.boundary.broker import Channel, Thread, broker, changes, thread_of
from tests.support import vmm_standin
from tests.support.specimen import specimen, two_cpus
from tests.support.vmm_standin import Spec, copy_of_python
from tests.support.waiting import wait_for

pytestmark = pytest.mark.root

PYTHON: Final = os.path.realpath(sys.executable)
GONE: Final = 2**22 + 1
"""A number that no process has."""

EXCLUSIVE: Final = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
WINDOW: Final = struct.Struct("=IQQQIIHB")


@contextmanager
def running(program: Path | str, *arguments: str) -> Iterator[int]:
    """Run a program that does nothing."""
    with subprocess.Popen([program, *(arguments or ("60",))]) as process:
        try:
            wait_for(lambda: os.readlink(f"/proc/{process.pid}/exe") == str(program), "its exec")
            yield process.pid
        finally:
            process.kill()


def linked(pid: int) -> bytes:
    """Return the executable of a process, nothing where it shows none."""
    try:
        return os.fsencode(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return b""


def first_thread(pid: int, *, inode: bool = False) -> Thread:
    """Return the first thread of a process."""
    return thread_of(pid, pid, inode=inode)


def refusal(ask: Channel, pid: int) -> int:
    """Return why a process's thread may not be moved; 0 if it may."""
    ((number, _),) = ask("affinities", changes([first_thread(pid)], {0, 1, 2, 3})).changed
    return number


# ---- affinities --------------------------------------------------------------------------


@pytest.mark.parametrize("inode", [False, True], ids=["start", "inode"])
def test_affinities_of_a_vmm(inode: bool) -> None:
    """Each thread has its own set, one that is not the one that was named is left."""
    first, second = two_cpus()
    with specimen(3) as vmm, broker(vmms=[PYTHON]) as ask:
        threads = [thread_of(vmm.pid, tid, inode=inode) for tid in vmm.tids]
        done = ask("affinities", changes(threads, {first}, {second})).changed
        assert done == [(0, {first}), *[(0, {second})] * 3]
        assert [os.sched_getaffinity(tid) for tid in vmm.tids] == [{first}, *[{second}] * 3]
        foreign = Thread(vmm.pid, os.getppid(), 1)
        late = threads[1]._replace(starttime=threads[1].starttime + 1, inode=0)
        reused = threads[1]._replace(starttime=1, inode=1)
        done = ask("affinities", changes([foreign, late, reused, threads[2]], {first})).changed
        assert [number for number, _ in done] == [errno.ESRCH, errno.ESTALE, errno.ESTALE, 0]
        vmm.end(threads[3].tid)
        ((number, _),) = ask("affinities", changes([threads[3]], {first})).changed
        assert number == errno.ESRCH
        ((number, _),) = ask("affinities", changes([threads[1]], {8191})).changed
        assert number == errno.EINVAL, "the kernel's answer"
        assert os.sched_getaffinity(threads[1].tid) == {second}


def test_nobody_elses_threads_are_touched() -> None:
    """Asked for every process of this machine, kernel threads too, it refuses each."""
    with specimen(2) as bystander, broker(vmms=["/nonexistent/qemu"]) as ask:
        mine = [bystander.pid, os.getpid()]
        before = [os.sched_getaffinity(pid) for pid in mine]
        threads = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                comm = Path(f"/proc/{pid}/comm").read_text()
                if pid != ask.pid and not comm.startswith(("virtiofsd", "nydusd")):
                    threads.append(first_thread(pid))
        assert {1, *mine} <= {thread.tgid for thread in threads}
        refused = set()
        for at in range(0, len(threads), 512):
            done = ask("affinities", changes(threads[at : at + 512], {min(before[0])})).changed
            refused |= {number for number, _ in done}
        assert errno.EACCES in refused
        assert refused <= {errno.EACCES, errno.ESRCH}
        assert [os.sched_getaffinity(pid) for pid in mine] == before


def test_it_moves_itself_and_its_children_but_shows_nothing_of_them() -> None:
    """So they keep off exclusive pCPUs."""
    _, second = two_cpus()
    with broker() as ask, ask.child("reader") as reader:
        threads = [first_thread(pid) for pid in (ask.pid, reader.pid)]
        assert ask("affinities", changes(threads, {second})).changed == [(0, {second})] * 2
        for name in ("descriptors", "kvm-vcpus"):
            assert ask.refusals(name, ask.pid) == errno.EACCES
        values = ask("classes", os.SCHED_BATCH, 0, changes(threads)).changed
        assert values == [(errno.EACCES, set())] * 2


# ---- which processes ---------------------------------------------------------------------


def test_a_vmm_is_its_executable(tmp_path: Path) -> None:
    """Path, file, owner and mode of it; nothing that the process says itself."""
    program = tmp_path / "bin/qemu-system-test"
    program.parent.mkdir()
    shutil.copy("/bin/sleep", program)
    with broker(vmms=[f"{tmp_path}/bin/qemu-system-*"]) as ask, running(program) as pid:
        assert refusal(ask, pid) == 0
        for mode in (0o777, 0o775, 0o757):
            program.chmod(mode)
            assert refusal(ask, pid) == errno.EACCES, f"others may write it: {mode:o}"
        program.chmod(0o755)
        os.chown(program, 4242, 4242)
        assert refusal(ask, pid) == errno.EACCES, "another user's"
        program.unlink()
        assert refusal(ask, pid) == errno.EACCES, "another user's, deleted"
        with running("/usr/bin/sleep") as other:
            assert refusal(ask, other) == errno.EACCES
        shutil.copy("/bin/sleep", program)
        with running(program) as updated:
            program.unlink()
            assert refusal(ask, updated) == 0, "updated while it ran"
            shutil.copy("/bin/sleep", program)
            assert refusal(ask, updated) == 0


def test_a_vmm_in_a_pid_namespace_is_not_the_hosts(tmp_path: Path) -> None:
    """A container's root can start a program from a path of the host's name."""
    program = tmp_path / "qemu-system-test"
    shutil.copy("/bin/sleep", program)
    command = ["unshare", "--pid", "--fork", "--kill-child", str(program), "60"]
    with broker(vmms=[str(program)]) as ask, subprocess.Popen(command) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            (pid,) = wait_for(lambda: children.read_text().split(), "the process")
            wait_for(lambda: os.readlink(f"/proc/{pid}/exe") == str(program), "its exec")
            assert refusal(ask, int(pid)) == errno.EACCES
        finally:
            process.kill()


_HALF: Final = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID
half = subprocess.Popen([sys.argv[1], "60"])
print(half.pid, flush=True)
sys.stdin.read()
half.kill()
half.wait()
"""


@pytest.mark.parametrize(
    ("parent", "name", "counts"),
    [
        ("virtiofsd-parent", "virtiofsd", True),
        ("virtiofsd-parent", "qemu-system-test", False),
        ("stranger", "virtiofsd", False),
    ],
)
def test_a_half_in_a_pid_namespace(tmp_path: Path, parent: str, name: str, counts: bool) -> None:
    """Of what is in a pid namespace only the child of the host's own file server counts."""
    shutil.copy(PYTHON, tmp_path / parent)
    shutil.copy("/bin/sleep", tmp_path / name)
    with (
        broker(vmms=[f"{tmp_path}/qemu-*"]) as ask,
        subprocess.Popen(
            [tmp_path / parent, "-c", _HALF, tmp_path / name],
            env={"PYTHONHOME": sys.base_prefix},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        (half,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        wait_for(lambda: os.readlink(f"/proc/{half}/exe") == str(tmp_path / name), "its exec")
        assert refusal(ask, int(half)) == (0 if counts else errno.EACCES)
        assert process.stdin is not None
        process.stdin.close()


def test_what_is_shown_of_strangers() -> None:
    """Executable and command line of any process, and nothing more."""
    with specimen(1) as stranger, broker(qmp=True) as ask, ask.child("reader") as reader:
        pid, link = stranger.pid, f"/proc/{stranger.pid}/exe"
        reply, found = ask("executable", pid), os.stat(link)
        assert reply.content == os.fsencode(os.readlink(link))
        assert (reply.status.inode, reply.status.uid) == (found.st_ino, found.st_uid)
        assert ask("executable", GONE).errno == errno.ENOENT
        own, second = linked(os.getpid()), linked(2)  # kthreadd, but not in a container
        several = array("I", [GONE, pid, 2, 2**32 - 1, os.getpid()]).tobytes()
        shown = ["", *map(os.fsdecode, (reply.content, second)), "", os.fsdecode(own)]
        assert ask("executables", several).value == shown
        for data in (several[:-1], array("I", [pid] * 257).tobytes()):
            assert ask.refusals("executables", data) == errno.EINVAL
        many = ask("executables", array("I", [pid] * 256).tobytes())
        assert many.value == [os.fsdecode(reply.content)] * 256
        for name in ("descriptors", "kvm-vcpus"):
            assert ask.refusals(name, pid) == errno.EACCES
            assert ask.refusals(name, GONE) == errno.ESRCH
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert reader("slow-file", 4 << 20, pid, "cmdline").data == line
        assert reader("slow-file", 5, pid, "cmdline").data == line[:5]
        head = f"{found.st_dev} {found.st_ino} {found.st_uid} {found.st_mode:o}\n"
        assert reader("slow-file", 0, pid, "exe").data == os.fsencode(head + os.readlink(link))
        assert reader.refusals("slow-file", 99, GONE, "cmdline") == errno.ENOENT
        for file in ("maps", "numa_maps"):
            assert reader.refusals("slow-file", 99, pid, file) == errno.EACCES
        for file in ("environ", "mem", "root", "status", "fd/0", "../1/cmdline"):
            assert reader.refusals("slow-file", 99, pid, file) == errno.EINVAL
        tids = struct.pack("=2I", *stranger.tids)
        assert reader.refusals("system-calls", pid, tids) == errno.EACCES


def test_a_long_command_line_is_cut() -> None:
    """At 128 KiB, whatever the limit."""
    command = ["sh", "-c", "read x", *["x" * 100_000] * 2]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process, broker() as ask:
        line = wait_for(Path(f"/proc/{process.pid}/cmdline").read_bytes, "its command line")
        assert len(line) > 200_000
        with ask.child("reader") as reader:
            data = reader("slow-file", 4 << 20, process.pid, "cmdline").data
        process.communicate(b"\n")
    assert data == line[: 128 * 1024]


def test_system_calls_and_mappings_of_a_vmm() -> None:
    """One for each thread, empty for one that is not there; of 1,024 threads at most."""
    with specimen(2) as vmm, broker(vmms=[PYTHON]) as ask, ask.child("reader") as reader:
        shown = [Path(f"/proc/{vmm.pid}/task/{tid}/syscall").read_text() for tid in vmm.tids]
        asked = struct.pack("=4I", *vmm.tids, 1)
        calls = reader("system-calls", vmm.pid, asked).value
        assert calls == [*([text.strip(), ""] for text in shown), ["", ""]]
        most = struct.pack("=1024I", *[vmm.pid] * 1024)
        assert reader("system-calls", vmm.pid, most).errno == 0
        assert reader.refusals("system-calls", vmm.pid, most + most[:4]) == errno.EINVAL
        assert reader.refusals("system-calls", vmm.pid, b"abc") == errno.EINVAL
        maps = reader("slow-file", 4 << 20, vmm.pid, "maps").data
        assert maps == Path(f"/proc/{vmm.pid}/maps").read_bytes()


_DEVICES: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # private, all of it
assert libc.mount(b"none", b"/dev", b"tmpfs", 0, None) == 0
os.mkdir("/dev/vfio")
held = [os.open(f"/dev/{name}", os.O_CREAT) for name in ("vfio/17", "vfio/vfio", "secret")]
for _ in range(int(sys.argv[1])):
    os.dup(held[2])
held.append(os.open("/dev/vfio/18", os.O_CREAT))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("others", "last"), [(0, True), (2040, True), (2048, False)])
def test_descriptors_of_a_vmm(others: int, last: bool) -> None:
    """Devices alone, and only of the first 2,048 descriptors: a VMM can not keep it busy."""
    command = ["prlimit", "--nofile=4096", PYTHON, "-c", _DEVICES, str(others)]
    with (
        broker(vmms=[PYTHON]) as ask,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as vmm,
    ):
        assert vmm.stdout is not None
        assert vmm.stdout.readline()
        links = ask("descriptors", vmm.pid).value
        assert links == ["/dev/vfio/17", "/dev/vfio/vfio", *["/dev/vfio/18"] * last]
        vmm.communicate(b"")


def test_vcpus_of_kvm(tmp_path: Path) -> None:
    """Of the VMs that a thread of the VMM made: id, thread and time of each, and nothing else."""
    with specimen(1) as vmm, broker(vmms=[PYTHON], debugfs=str(tmp_path)) as ask:
        for maker in (vmm.tids[1], os.getppid()):
            for vcpu in ("vcpu0", "vcpu3", "vcpux", "other"):
                folder = tmp_path / f"kvm/{maker}-12/{vcpu}"
                folder.mkdir(parents=True)
                (folder / "pid").write_text("77\n")
                os.utime(folder, ns=(5, 5))
        (tmp_path / f"kvm/{vmm.pid}").mkdir()
        assert sorted(ask("kvm-vcpus", vmm.pid).value) == [[0, 77, 5], [3, 77, 5]]
        assert ask("kvm-vcpus", os.getpid()).value == [], "another VMM, which made none"


def test_a_process_whose_first_thread_has_exited(tmp_path: Path) -> None:
    """The others show what it is."""
    script = "import threading, time, ctypes, os\n"
    script += "threading.Thread(target=time.sleep, args=(60,)).start()\n"
    script += "ctypes.CDLL(None).syscall(60, 0)\n"  # exit of this thread alone
    if os.uname().machine != "x86_64":
        pytest.skip("the number of a system call")
    with (
        broker(vmms=[PYTHON]) as ask,
        subprocess.Popen([PYTHON, "-c", script]) as vmm,
        ask.child("reader") as reader,
    ):
        stat = Path(f"/proc/{vmm.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(") ")[2][0] == "Z", "its first thread's end")
        assert ask("executable", vmm.pid).content == os.fsencode(PYTHON)
        assert ask("executables", struct.pack("=I", vmm.pid)).value == [PYTHON]
        assert reader("slow-file", 7, vmm.pid, "cmdline").data == os.fsencode(PYTHON)[:7]
        assert refusal(ask, vmm.pid) == 0 or os.sched_getaffinity(vmm.pid)
        assert ask("descriptors", vmm.pid).errno == 0
        vmm.kill()


# ---- scheduling classes ------------------------------------------------------------------


@pytest.fixture
def vcpus(tmp_path: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """A VMM whose threads have names of vCPUs, and others; its pid, and each by its name."""
    names = (
        "CPU 0/KVM",
        "CPU 12/KVM",
        "vcpu3",
        "CPU 0/TCG",
        "CPU 0/KVM2",
        "xCPU 0/KVM",
        "CPU /KVM",
        "vcpu",
        "vcpu1x",
    )
    program = copy_of_python(tmp_path / "qemu-system-test")
    with vmm_standin.running(Spec(program, (program, *["-argument"] * 30), names)) as pid:
        folder = Path(f"/proc/{pid}/task")
        found = {
            (folder / tid / "comm").read_text().strip(): int(tid) for tid in os.listdir(folder)
        }
        assert set(names) <= found.keys()
        yield pid, found


def test_real_time_is_for_vcpus_with_a_cpu_of_their_own(
    vcpus: tuple[int, dict[str, int]], tmp_path: Path
) -> None:
    """By name and mask; what such a thread starts does not inherit it; it can be given back."""
    pid, tids = vcpus
    (first, second), names = two_cpus(), list(tids)
    threads = [thread_of(pid, tids[name]) for name in names]
    with broker(vmms=[f"{tmp_path}/qemu-*"], rt=["CPU [0-9]+/KVM", "vcpu[0-9]"]) as ask:
        named = {"CPU 0/KVM", "CPU 12/KVM", "vcpu3"}
        for cpus, allowed in (({first, second}, set[str]()), ({first}, named)):
            ask("affinities", changes(threads, cpus))
            done = ask("classes", os.SCHED_FIFO, 1, changes(threads)).changed
            got = {name for name, (number, _) in zip(names, done, strict=True) if not number}
            assert got == allowed
            assert {number for number, _ in done} <= {0, errno.EACCES}
            assert {n for n in names if os.sched_getscheduler(tids[n]) == EXCLUSIVE} == allowed
        late = threads[0]._replace(starttime=1)
        assert ask("classes", os.SCHED_OTHER, 0, changes([late])).changed[0][0] == errno.ESTALE
        done = ask("classes", os.SCHED_BATCH, 0, changes(threads)).changed
        assert done == [(0, set())] * len(threads)
        assert {os.sched_getscheduler(tid) for tid in tids.values()} == {os.SCHED_BATCH}


def test_neither_the_daemon_nor_the_broker_gets_another_class() -> None:
    """Not even a thread that is called a vCPU and has one CPU, as a VMM's would."""
    refusals: list[int] = []
    with broker(rt=["CPU [0-9]/KVM"]) as ask:

        def be_like_a_vcpu() -> None:
            tid = threading.get_native_id()
            Path(f"/proc/self/task/{tid}/comm").write_text("CPU 0/KVM")
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            threads = [thread_of(os.getpid(), tid), first_thread(ask.pid)]
            for policy, priority in ((os.SCHED_RR, 1), (os.SCHED_BATCH, 0)):
                done = ask("classes", policy, priority, changes(threads)).changed
                refusals.extend(number for number, _ in done)

        thread = threading.Thread(target=be_like_a_vcpu)
        thread.start()
        thread.join()
    assert refusals == [errno.EACCES] * 4


# ---- jails -------------------------------------------------------------------------------

CUT: Final = "0123456789abcdef" * 2
ARGV: Final = (
    "/firecracker",
    "--id",
    CUT,
    "--start-time-us",
    "1",
    "--config-file",
    "/fcConfig.json",
)


class Jails:
    """A broker, Kata's folder, and a firecracker that can be run in a jail there."""

    def __init__(self, ask: Channel, vc: Path) -> None:
        self.ask, self.vc = ask, vc
        program = copy_of_python(vc.parent / "bin/firecracker")
        self.spec = Spec(program, ARGV, jail=str(vc / "firecracker" / CUT / "root"))

    def verify(self, pid: int, name: str = CUT, program: str = "firecracker", base: int = 0) -> int:
        """Return the errno of verify-jail."""
        return self.ask.refusals("verify-jail", pid, base, program, name)


@pytest.fixture
def jails(tmp_path: Path) -> Iterator[Jails]:
    """Kata's directory, as pytest's own are: root's."""
    (tmp_path / "vc").mkdir()
    with broker(vmms=[f"{tmp_path}/bin/firecracker*"], vc=str(tmp_path / "vc")) as ask:
        yield Jails(ask, tmp_path / "vc")


def test_a_jailed_vmm(jails: Jails) -> None:
    """It is touched once its jail was named, and only while it is in it."""
    with vmm_standin.running(jails.spec) as pid:
        assert refusal(jails.ask, pid) == errno.EACCES, "nobody named its jail"
        assert jails.verify(pid) == 0
        assert refusal(jails.ask, pid) == 0
        assert jails.ask("descriptors", pid).errno == 0
        other = jails.vc / "firecracker/other/root"
        shutil.copytree(jails.spec.jail, other, ignore=lambda _, names: {"proc", "dev"} & {*names})
        assert jails.verify(pid, "other") == errno.ESTALE
        assert refusal(jails.ask, pid) == errno.EACCES, "it counts where it was verified last"
        (other / "firecracker").unlink()
        os.link(f"{jails.spec.jail}/firecracker", other / "firecracker")
        assert jails.verify(pid, "other") == errno.ESTALE, "its program, and not its root"
    assert refusal(jails.ask, os.getpid()) == errno.EACCES


@pytest.mark.parametrize("part", ["", "..", "../..", "../../..", "firecracker"])
def test_who_may_write_in_a_jail(jails: Jails, part: str) -> None:
    """Each folder from Kata's to the jail, and the program, is root's and writable by nobody else.

    What changes later counts at once.
    """
    path = Path(os.path.normpath(f"{jails.spec.jail}/{part}"))
    with vmm_standin.running(jails.spec) as pid:
        before = path.stat().st_mode & 0o7777
        for mode, uid in ((0o775, 0), (0o757, 0), (before, 4242)):
            for verified in (False, True):
                assert jails.verify(pid) == 0
                path.chmod(mode)
                os.chown(path, uid, 0)
                if verified:
                    assert refusal(jails.ask, pid) == errno.EACCES
                else:
                    assert jails.verify(pid) == errno.EACCES
                os.chown(path, 0, 0)
                path.chmod(before)
        assert jails.verify(pid) == 0
        assert refusal(jails.ask, pid) == 0


def test_another_program_in_the_jail(jails: Jails) -> None:
    """A process keeps its root; what it runs must still be the jail's program."""
    with vmm_standin.running(jails.spec) as pid:
        assert jails.verify(pid) == 0
        program = Path(jails.spec.jail, "firecracker")
        program.rename(program.with_name("before"))
        assert refusal(jails.ask, pid) == errno.EACCES
        shutil.copy(program.with_name("before"), program)
        assert jails.verify(pid) == errno.ESTALE
    with vmm_standin.running(dataclasses.replace(jails.spec, jail="")) as pid:
        assert jails.verify(pid) == errno.ESTALE, "it runs outside of it"


def test_links_are_no_jails(jails: Jails) -> None:
    """Nothing below the folder of jails is reached by a link."""
    real = jails.vc.parent / "elsewhere"
    spec = dataclasses.replace(jails.spec, jail=str(real / "firecracker" / CUT / "root"))
    with vmm_standin.running(spec) as pid:
        (jails.vc / "firecracker").symlink_to(real / "firecracker")
        assert jails.verify(pid) in {errno.ELOOP, errno.ENOTDIR}
        (jails.vc / "firecracker").unlink()
        (jails.vc / "firecracker" / CUT).mkdir(parents=True)
        (jails.vc / "firecracker" / CUT / "root").symlink_to(spec.jail)
        assert jails.verify(pid) in {errno.ELOOP, errno.ENOTDIR}


def test_what_is_no_jail(jails: Jails) -> None:
    """A program that is no VMM, a process without a jail, and one that is not there."""
    assert jails.verify(os.getpid(), program="sleep") == errno.EACCES
    assert jails.verify(os.getpid()) == errno.ESTALE
    assert jails.verify(GONE) == errno.ENOENT


def test_a_child_knows_the_jails_from_before_it_began(jails: Jails) -> None:
    """The daemon starts another one after that."""
    with vmm_standin.running(jails.spec) as pid, jails.ask.child("reader") as early:
        assert jails.verify(pid) == 0
        with jails.ask.child("reader") as late:
            assert early.refusals("slow-file", 99, pid, "maps") == errno.EACCES
            assert late("slow-file", 99, pid, "maps").errno == 0


# ---- values of the kernel ----------------------------------------------------------------

FILES: Final = {
    "interrupt 24 1": "/proc/irq/24/smp_affinity_list",
    "default-mask  3": "/proc/irq/default_smp_affinity",
    "workqueues  3": "/sys/devices/virtual/workqueue/cpumask",
    "watchdog  0-1": "/proc/sys/kernel/watchdog_cpumask",
    "rps eth0/rx-0 3": "/sys/class/net/eth0/queues/rx-0/rps_cpus",
    "xps eth0/tx-1 3": "/sys/class/net/eth0/queues/tx-1/xps_cpus",
    "idle-limit 1 n/a": "/sys/devices/system/cpu/cpu1/power/pm_qos_resume_latency_us",
    "governor 1 performance": "/sys/devices/system/cpu/cpufreq/policy1/scaling_governor",
}
"""By write the file that it goes to."""

IN_PLACE: Final = ("/proc/irq", "/proc/sys/kernel", "/sys/devices/virtual/workqueue",
                   "/sys/class/net", "/sys/devices/system/cpu")  # fmt: skip


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A tree with each tunable's file, and the mounts that put it in the kernel's place."""
    for path in FILES.values():
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text("before" + " " * 20)
    return tmp_path, {place: tmp_path / place[1:] for place in IN_PLACE}


@pytest.mark.parametrize("level", ["irq", "full"])
def test_tunables_of_a_level(level: str, kernel: tuple[Path, dict[str, Path]]) -> None:
    """Each is written to its file and read back; another level's refuse the whole request."""
    root, mounts = kernel
    with broker(mounts, quiet=level) as ask:
        for write, path in FILES.items():
            value = write.split(" ")[2]
            file = root / path[1:]
            request = f"{write}\ninterrupt 99 1".encode()
            if level == "full" or write.startswith(("interrupt", "default-mask")):
                (done, absent) = ask("tunables", request).written
                assert (done[0], done[1].split()[0]) == (0, value), write
                assert absent[0] == errno.ENOENT, "one that fails does not stop the others"
                assert file.read_text().startswith(f"{value}\n")
            else:
                assert ask.refusals("tunables", request) == errno.EACCES
                assert file.read_text().startswith("before")
        assert (ask.refusals("tunables", b"kernel-thread 7:1 0") == 0) is (level == "full")


def test_a_tunable_that_is_a_link(kernel: tuple[Path, dict[str, Path]]) -> None:
    """It is not followed."""
    root, mounts = kernel
    file = root / "proc/irq/24/smp_affinity_list"
    file.unlink()
    (root / "secret").write_text("untouched")
    file.symlink_to(root / "secret")
    with broker(mounts, quiet="irq") as ask:
        assert ask("tunables", b"interrupt 24 1").written == [(errno.ELOOP, "")]
    assert (root / "secret").read_text() == "untouched"


def test_only_kernel_threads_are_moved() -> None:
    """No process, and none that started at another time or has ended."""
    with broker(quiet="full") as ask:
        for pid in (os.getpid(), 1, ask.pid):
            start = first_thread(pid).starttime
            asked = [
                *(f"kernel-thread {pid}:{start} 0", f"kernel-thread {pid}:{start + 1} 0"),
                *(f"kernel-thread {GONE}:1 0", f"kernel-thread {pid}:{start} 1-2-3"),
            ]
            done = ask("tunables", "\n".join(asked).encode()).written
            assert [number for number, _ in done] == [
                *(errno.EPERM, errno.ESRCH, errno.ESRCH, errno.EINVAL)
            ]


@pytest.fixture
def resctrl(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A folder in the place of /sys/fs/resctrl, with one class that was made before."""
    root = tmp_path / "fs/resctrl"
    for group in ("", "kata-pin-fast"):
        (root / group / "mon_groups").mkdir(parents=True)
        for file in ("tasks", "schemata"):
            (root / group / file).touch()
    return root, {"/sys/fs": root.parent}


def test_groups_of_resctrl(resctrl: tuple[Path, dict[str, Path]]) -> None:
    """Of its own names, in classes of the first message; threads of VMMs alone join one."""
    root, mounts = resctrl
    classes = [("fast", "L3:0=f MB:0=50"), ("none", "L3:0=f")]
    options: dict[str, Any] = {"resctrl": True, "classes": classes, "vmms": [PYTHON]}
    with broker(mounts, **options) as ask, specimen(1) as vmm, running("/usr/bin/sleep") as other:
        for name in ("p1", "p1"):
            assert ask.refusals("make-group", "", name) == 0, "one that is there is good too"
        group = root / "mon_groups/kata-pin-p1"
        assert group.is_dir()
        (group / "tasks").touch()
        threads = [thread_of(vmm.pid, vmm.tids[1]), first_thread(other)]
        done = ask("join-group", "", "p1", changes(threads)).changed
        assert [number for number, _ in done] == [0, errno.EACCES]
        assert (group / "tasks").read_text() == f"{vmm.tids[1]}\n"
        assert ask.refusals("make-group", "fast", "p1") == 0
        assert (root / "kata-pin-fast/mon_groups/kata-pin-p1").is_dir()
        assert (root / "kata-pin-fast/schemata").read_text() == "MB:0=50\n"
        assert ask.refusals("make-group", "of-nobody", "p1") == errno.EACCES
        (group / "tasks").unlink()
        for name in ("p1", "p1", "never-made"):
            assert ask.refusals("remove-group", "", name) == 0
        assert not group.exists()
        assert ask.refusals("remove-group", "", "") == errno.EINVAL
        assert ask.refusals("make-group", "", "") == errno.EINVAL


def test_a_class_of_resctrl_that_is_refused_takes_none(
    resctrl: tuple[Path, dict[str, Path]],
) -> None:
    """There are few: a new one whose schemata can not be written is removed, an old one stays."""
    root, mounts = resctrl
    (root / "kata-pin-fast/schemata").unlink()
    classes = [("fast", "L3:0=f"), ("new", "L3:0=f")]
    with broker(mounts, resctrl=True, classes=classes) as ask:
        for name, was_there in (("new", False), ("fast", True)):
            assert ask.refusals("make-group", name, "p1") == errno.ENOENT
            assert (root / f"kata-pin-{name}").exists() is was_there


def test_a_class_of_resctrl_that_was_removed_is_configured_again(
    resctrl: tuple[Path, dict[str, Path]],
) -> None:
    """The kernel gives the next one of that name all of the cache; until then once is enough."""
    root, mounts = resctrl
    folder = root / "kata-pin-fast"
    with broker(mounts, resctrl=True, classes=[("fast", "L3:0=f")]) as ask:
        for _ in range(2):
            assert ask.refusals("make-group", "fast", "p1") == 0
            assert (folder / "schemata").read_text() == "L3:0=f\n"
            (folder / "schemata").write_text("")
            assert ask.refusals("make-group", "fast", "p2") == 0
            assert (folder / "schemata").read_text() == ""
            shutil.rmtree(folder)
            folder.mkdir()
            assert ask.refusals("remove-group", "fast", "") == 0
            assert not folder.exists()
            (folder / "mon_groups").mkdir(parents=True)
            (folder / "schemata").touch()


@pytest.mark.parametrize("name", ["make-group", "remove-group"])
def test_a_broker_without_resctrl(name: str, resctrl: tuple[Path, dict[str, Path]]) -> None:
    """Groups are removed also after the setting was switched off."""
    root, mounts = resctrl
    (root / "mon_groups/kata-pin-p1").mkdir()
    with broker(mounts) as ask:
        assert ask.refusals(name, "", "p1") == (0 if name == "remove-group" else errno.EACCES)
    assert (root / "mon_groups/kata-pin-p1").exists() is (name == "make-group")


def test_task_switches_of_a_cpu() -> None:
    """A descriptor of a perf event that is not enabled; of a CPU that is there."""
    with broker() as ask:
        reply = ask("switches", min(os.sched_getaffinity(0)))
        if reply.errno in {errno.EACCES, errno.EPERM, errno.ENOENT, errno.EOPNOTSUPP}:
            pytest.skip(f"no perf events here: {os.strerror(reply.errno)}")
        (fd,) = reply.descriptors
        assert os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[perf_event]"
        os.close(fd)
        assert ask.refusals("switches", 8191) in {errno.EINVAL, errno.ENODEV}


# ---- memory and monitors -----------------------------------------------------------------


def window(pid: int, **others: int) -> bytes:
    """Return the request for four pages of a process at an address that it does not have."""
    values = {"start": first_thread(pid).starttime if pid != GONE else 1, "node": 0} | others
    near = (1 << values["node"]).to_bytes(128, "little").rstrip(b"\0")
    return WINDOW.pack(pid, values["start"], 4096, 4096, 4, 4, values["node"], 0) + near


def test_pages_of_a_vmm_alone() -> None:
    """Of the process that was named, to a node that there is."""
    with specimen() as vmm, broker(vmms=[PYTHON], memory=True) as ask, ask.child("mover") as mover:
        done = mover("move-pages", window(vmm.pid))
        assert (done.errno, done.value) == (0, [4, 0, 0, 0])
        assert mover.refusals("move-pages", window(vmm.pid, start=1)) == errno.ESTALE
        assert mover.refusals("move-pages", window(GONE)) == errno.ESRCH
        assert mover.refusals("move-pages", window(vmm.pid, node=900)) == errno.ENODEV
        with running("/usr/bin/sleep") as stranger:
            assert mover.refusals("move-pages", window(stranger)) == errno.EACCES


GREETING: Final = b'{"QMP": {}}\r\n'.replace(b": ", b":")
EVENT: Final = b'{"timestamp": {}, "event": "RESUME"}\r\n'


@contextmanager
def monitor(path: Path, *lines: bytes | None) -> Iterator[list[bytes]]:
    """Be QEMU's monitor for one session: a line before each request, None for silence."""
    asked: list[bytes] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        server.bind(str(path))
        server.listen()
        server.settimeout(20)

        def serve() -> None:
            end, _ = server.accept()
            with end, suppress(OSError), end.makefile("rb") as requests:
                end.settimeout(20)
                for line in lines:
                    if line is None:
                        requests.read()
                        return
                    end.sendall(line)
                    if data := requests.readline():
                        asked.append(data)

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        yield asked


ANSWER: Final = b'{"return":[]}\r\n'
TIMES: Final = (1000, 5000)


@pytest.mark.parametrize("name", ["qmp", "extra-monitor"])
def test_a_monitor_is_asked_two_things(name: str, tmp_path: Path) -> None:
    """Its answers come as they are; events between them are passed over."""
    lines = (GREETING, EVENT + b'{"return": {}}\r\n'.replace(b": ", b":"), EVENT + ANSWER, ANSWER)
    with broker(vc=str(tmp_path), qmp=True) as ask, ask.child("monitor") as child:
        with monitor(tmp_path / f"vm/p1/{name}.sock", *lines) as asked:
            reply = child("vcpu-list", "p1", name, *TIMES)
        assert (reply.errno, reply.data) == (0, b'{"return":[]}\n{"return":[]}')
        assert [one.strip() for one in asked] == [
            b'{"execute":"qmp_capabilities"}',
            b'{"execute":"query-cpus-fast"}',
            b'{"execute":"query-iothreads"}',
        ]
        assert child.refusals("vcpu-list", "absent", name, *TIMES) == errno.ENOENT


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ((b"HTTP/1.1 200 OK\r\n",), errno.EPROTO),
        ((b"x" * 5000,), errno.EMSGSIZE),
        ((None,), errno.ETIMEDOUT),
        ((GREETING, None), errno.ETIMEDOUT),
        ((GREETING, ANSWER, b"x" * (2 << 20)), errno.EMSGSIZE),
        ((GREETING, ANSWER, EVENT * 60_000), errno.EMSGSIZE),
        ((GREETING, ANSWER), errno.EPROTO),
    ],
    ids=["other", "long greeting", "mute", "mute later", "long", "events", "closed"],
)
def test_a_hostile_monitor(lines: Sequence[bytes | None], number: int, tmp_path: Path) -> None:
    """It is given up on in time, after so many bytes; the child asks the next one."""
    with broker(vc=str(tmp_path), qmp=True) as ask, ask.child("monitor") as child:
        times = (200, 400) if number == errno.ETIMEDOUT else TIMES
        began = time.monotonic()
        with monitor(tmp_path / "vm/p1/qmp.sock", *lines):
            assert child.refusals("vcpu-list", "p1", "qmp", *times) == number
        if number == errno.ETIMEDOUT:
            assert time.monotonic() - began > times[len(lines) - 1] / 1000
        good = (GREETING, ANSWER, ANSWER, ANSWER)
        with monitor(tmp_path / "vm/p2/qmp.sock", *good):
            assert child("vcpu-list", "p2", "qmp", *TIMES).errno == 0
