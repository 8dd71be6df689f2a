"""Processes and their table, on trees that change between two looks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from errno import EMFILE
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.errors import HostError, TaskGone
from kata_pin.base.sandbox import PF_KTHREAD, Process, ProcessKey
from kata_pin.base.steps import finish
from kata_pin.linux import process
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.linux.tasks import TaskReader
from kata_pin.rights.calls import Calls
from tests.support.hosttree import FakeHost


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def comms(index: ProcessIndex) -> dict[int, str]:
    return {p.pid: p.comm for p in index.all()}


def test_root_joins_paths() -> None:
    """Every path hangs off the root, debugfs included, wherever it is mounted."""
    root = HostRoot("/tree/", debugfs="/run/debug")
    assert root.proc(1, "stat") == "/tree/proc/1/stat"
    assert root.sys("fs") == "/tree/sys/fs"
    assert root.debug("kvm") == "/tree/run/debug/kvm"
    assert root.path("/etc/x") == "/tree/etc/x"
    assert not root.live
    assert HOST.live
    assert HOST.proc(1) == "/proc/1"


def test_hostile_name(host: FakeHost) -> None:
    """A name with brackets and spaces does not shift the fields after it."""
    host.process(10, comm="a) R 1 (b", ppid=7, starttime=42)
    found = process.read_process(host.root, 10)
    assert found == Process(ProcessKey(10, 42), 7, "a) R 1 (b", 0x0040_0000, "S")


def test_deleted_executable(host: FakeHost) -> None:
    """A replaced binary keeps its path, and that it is deleted is said."""
    host.process(10)
    link = host.folder / "proc/10/exe"
    assert process.exe(host.root, 10) == ("/usr/bin/python", False)
    link.unlink()
    link.symlink_to("/usr/bin/qemu (deleted)")
    assert process.exe(host.root, 10) == ("/usr/bin/qemu", True)


def test_no_executable_is_not_gone(host: FakeHost) -> None:
    """A kernel thread has no executable; a vanished process raises."""
    host.process(10, flags=PF_KTHREAD)
    (host.folder / "proc/10/exe").unlink()
    assert process.exe(host.root, 10) == ("", False)
    host.end(10)
    with pytest.raises(TaskGone):
        process.exe(host.root, 10)


def test_long_cmdline_is_cut(host: FakeHost) -> None:
    """A command line without end is cut at 128 KiB."""
    host.process(10)
    (host.folder / "proc/10/cmdline").write_bytes(b"x\0" * 200_000)
    assert len(process.cmdline(host.root, 10)) == 65_536


def test_alive(host: FakeHost) -> None:
    """Alive is this process, not its zombie and not a later one with its pid."""
    host.process(10, starttime=5)
    host.process(11, starttime=5, state="Z")
    assert process.is_alive(host.root, ProcessKey(10, 5))
    assert not process.is_alive(host.root, ProcessKey(10, 6))
    assert not process.is_alive(host.root, ProcessKey(11, 5))
    assert not process.is_alive(host.root, ProcessKey(12, 5))


def test_index_reads_only_what_is_new(host: FakeHost) -> None:
    """A known process is not read again, not even when its stat file would say otherwise."""
    host.process(10)
    index = ProcessIndex(host.root)
    index.refresh()
    host.process(11, comm="new")
    stat = host.folder / "proc/10/stat"
    stat.write_text(stat.read_text().replace("python", "renamed"))
    index.refresh()
    assert comms(index) == {10: "python", 11: "new"}
    index.refresh(full=True)
    assert comms(index) == {10: "renamed", 11: "new"}


def test_index_sees_a_reused_pid(host: FakeHost) -> None:
    """A pid that was freed and taken again between two refreshes is the new process."""
    host.process(10, comm="old")
    index = ProcessIndex(host.root)
    index.refresh()
    (host.folder / "proc/10").rename(host.folder / "kept")  # keeps the inode number taken
    host.process(10, comm="young", starttime=900)
    index.refresh()
    found = index.get(10)
    assert found is not None
    assert (found.comm, found.key.starttime) == ("young", 900)


def test_index_does_not_look_twice_for_one_event(host: FakeHost) -> None:
    """A look that began after an event shows what came of it; an older one does not."""
    index = ProcessIndex(host.root)
    heard = time.monotonic()
    index.refresh(since=heard)
    host.process(10)
    index.refresh(since=heard)
    assert comms(index) == {}
    index.refresh(since=time.monotonic())
    assert comms(index) == {10: "python"}
    host.process(11)
    index.refresh()
    assert comms(index) == {10: "python", 11: "python"}


def test_index_lists_only_where_a_task_came_or_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's census of tasks says so: of a living system nothing is listed in between."""
    census, listed = [b"100 7"], 0
    scandir = os.scandir

    def counted(path: str) -> Iterator[os.DirEntry[str]]:
        nonlocal listed
        listed += 1
        return scandir(path)

    monkeypatch.setattr(process, "_census", lambda _root: census[0])
    index = ProcessIndex(HOST)
    index.refresh()
    monkeypatch.setattr(os, "scandir", counted)
    index.refresh()
    assert listed == 0
    for birth, census[0] in enumerate((b"101 8", b"100 8", b""), start=1):
        index.refresh()
        assert listed == birth
    index.refresh()
    assert listed == 4
    index.refresh(full=True)
    assert listed == 5


def test_index_follows_a_new_parent(host: FakeHost) -> None:
    """When a parent exits, its children are read again."""
    host.process(10)
    host.process(11, ppid=10)
    index = ProcessIndex(host.root)
    index.refresh()
    assert [p.pid for p in index.children(10)] == [11]
    host.end(10)
    shutil.rmtree(host.folder / "proc/11/task")
    stat = host.folder / "proc/11/stat"
    stat.write_text(stat.read_text().replace("S 10 ", "S 1 ", 1))
    index.refresh()
    assert index.get(10) is None
    assert [p.pid for p in index.children(1)] == [11]


def test_index_reads_the_young_again(host: FakeHost) -> None:
    """A process seen in its first second may still be what it was forked from."""
    now_or_later = 10**12
    host.process(10, comm="kthreadd", flags=PF_KTHREAD, starttime=now_or_later)
    index = ProcessIndex(host.root)
    index.refresh()
    stat = host.folder / "proc/10/stat"
    stat.write_text(stat.read_text().replace("kthreadd", "vhost-7"))
    index.refresh()
    assert [p.pid for p in index.kernel_workers[7]] == [10]


def test_index_reads_who_runs_another_program_now(host: FakeHost) -> None:
    """However old it is; nobody else is read again for that."""
    for pid in (10, 11):
        host.process(pid, comm="shim")
    index = ProcessIndex(host.root)
    index.refresh()
    for pid in (10, 11):
        stat = host.folder / f"proc/{pid}/stat"
        stat.write_text(stat.read_text().replace("shim", "virtiofsd"))
    index.note_exec(10)
    index.note_exec(99)
    before = index.version
    index.refresh()
    assert comms(index) == {10: "virtiofsd", 11: "shim"}
    assert index.version > before


def test_kernel_workers_by_flag(host: FakeHost) -> None:
    """A process that calls itself vhost-7 is none."""
    host.process(10, comm="vhost-7", flags=PF_KTHREAD)
    host.process(11, comm="vhost-7")
    host.process(12, comm="vhost-77", flags=PF_KTHREAD)
    host.process(13, comm="kvm-pit/7", flags=PF_KTHREAD)
    host.process(14, comm="kworker/0:1", flags=PF_KTHREAD)
    index = ProcessIndex(host.root)
    index.refresh()
    workers = {owner: [p.pid for p in found] for owner, found in index.kernel_workers.items()}
    assert workers == {7: [10, 13], 77: [12]}


def test_vanishes_after_the_listing(host: FakeHost) -> None:
    """A process without a stat file any more is not in the table, and comes back when it is."""
    host.process(10)
    hidden = (host.folder / "proc/10/stat").rename(host.folder / "stat")
    index = ProcessIndex(host.root)
    index.refresh()
    assert index.all() == []
    hidden.rename(host.folder / "proc/10/stat")
    index.refresh()
    assert comms(index) == {10: "python"}


def test_no_proc(tmp_path: Path) -> None:
    """Without /proc the index says so."""
    with pytest.raises(HostError, match="list"):
        ProcessIndex(HostRoot(str(tmp_path))).refresh()


def test_thread_that_vanishes_is_left_out(host: FakeHost) -> None:
    """A pass goes on without a thread that exits during it, and ends with the process."""
    host.process(10, threads=3)
    (host.folder / "proc/10/task/11/stat").unlink()
    del host.calls.affinities[12]
    reader = CpusetReader(host.root)
    assert [task.key.tid for task in finish(TaskReader().read(host.root, 10, reader))] == [10]
    host.end_thread(10, 10)
    with pytest.raises(TaskGone):
        finish(TaskReader().read(host.root, 10, reader))


def test_fields_of_a_task(host: FakeHost) -> None:
    """A task has the fields of its stat file, its affinity and its cgroup."""
    host.process(10, comm="CPU 0/KVM", starttime=77, cgroup="0::/kata_x")
    host.calls.affinities[10] = frozenset({2})
    (task,) = finish(TaskReader().read(host.root, 10, CpusetReader(host.root)))
    assert (task.comm, task.key.starttime, task.cgroup) == ("CPU 0/KVM", 77, "/kata_x")
    assert (str(task.affinity), str(task.cpuset)) == ("2", "")
    assert (task.cpu_ticks, task.last_cpu) == (12, 2)


def test_a_batch_of_programs_that_is_refused_is_a_host_error() -> None:
    """A broker without descriptors for a long answer fails a look, which names what and why."""

    class Full(Calls):
        def executables(self, pids: Sequence[int]) -> list[str]:
            raise OSError(EMFILE, os.strerror(EMFILE))

    with pytest.raises(HostError, match="Too many open files"):
        process.exe_paths(replace(HOST, calls=Full()), [1])
