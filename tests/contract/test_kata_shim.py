"""A sandbox's processes: those of the stand-in for Kata's shim are what Kata 3.21's were recorded
to be. Kata itself cannot be had here."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kata_pin.peers.qemu import parse_qemu
from kata_pin.peers.vmm_cmdline import parse_shim
from tests.support import recordings
from tests.support.katalike import VIRTIOFSD, KataDirs, KataSandbox
from tests.support.qemu import Accelerator, Machine

pytestmark = [pytest.mark.qemu, pytest.mark.root, pytest.mark.timeout(180)]

RECORDED = recordings.DATA / "kata-3.21" / "debug-and-extra-monitor"
IOTHREAD = "iothread-1122876e2a9e5c87"


@dataclass(frozen=True)
class Process:
    """A process: its name, its parent's pid, its command line."""

    comm: str
    parent: int
    argv: Sequence[str]


@dataclass(frozen=True)
class Pod:
    """A sandbox p1 after four vCPUs were plugged: its processes, and (cpu-index, id) of these."""

    vc: str
    shim: Process
    shim_pid: int
    qemu: Process
    qemu_pid: int
    virtiofsd: Process | None
    plugged: Sequence[tuple[int, str]]


def _plugged(cpus: Sequence[dict[str, str | int]]) -> list[tuple[int, str]]:
    paths = [(int(one["cpu-index"]), str(one["qom-path"])) for one in cpus]
    return [(index, path.rpartition("/")[2]) for index, path in paths if "/peripheral/" in path]


def recorded(_: Path) -> Iterator[Pod]:
    """Yield Kata's."""
    found: dict[str, tuple[int, Process]] = {}
    for line in (RECORDED / "processes.txt").read_text().splitlines():
        match = re.match(r"pid (\d+) ppid (\d+) comm (.*?) cpus .*? :: (.*)$", line)
        assert match is not None, line
        process = Process(match[3], int(match[2]), match[4].split())
        found.setdefault(match[3], (int(match[1]), process))
    shim, qemu = found["containerd-shim"], found["qemu-system-x86"]
    argv = recordings.argv(RECORDED / "qemu-cmdline.txt")
    (replies,) = recordings.qmp_replies(RECORDED / "qmp.txt")
    yield Pod(
        "/run/vc", shim[1], shim[0], Process(qemu[1].comm, qemu[1].parent, argv), qemu[0],
        found["virtiofsd"][1], _plugged(replies["query-cpus-fast"]),
    )  # fmt: skip


def standin(folder: Path) -> Iterator[Pod]:
    """Yield the stand-in's."""
    machine = Machine(maximum=16, debug_threads=True, iothreads=(IOTHREAD,))
    kata = KataSandbox(
        KataDirs.below(folder), "p1", machine=machine, accelerator=Accelerator.TCG,
        extra_monitor=True, virtiofsd=VIRTIOFSD.exists(),
    )  # fmt: skip
    with kata:
        kata.shim.plug(4)
        cpus = kata.shim.execute("query-cpus-fast")
        server = _process(kata.virtiofsd_pid) if kata.virtiofsd_pid else None
        yield Pod(
            str(kata.dirs.vc), _process(kata.shim.pid), kata.shim.pid, _process(kata.pid), kata.pid,
            server, _plugged(cpus),
        )  # fmt: skip


def _process(pid: int) -> Process:
    proc = Path(f"/proc/{pid}")
    parent = int((proc / "stat").read_text().rpartition(") ")[2].split()[1])
    argv = (proc / "cmdline").read_bytes().decode().split("\0")[:-1]
    return Process((proc / "comm").read_text().strip(), parent, argv)


@pytest.fixture(scope="module", params=[standin, recorded])
def pod(request: pytest.FixtureRequest) -> Iterator[Pod]:
    folder = Path(tempfile.mkdtemp(prefix="ks"))
    yield from request.param(folder)
    shutil.rmtree(folder)


def test_the_shim(pod: Pod) -> None:
    """Its name, and a command line that names the sandbox."""
    assert pod.shim.comm == "containerd-shim"
    assert Path(pod.shim.argv[0]).name == "containerd-shim-kata-v2"
    assert parse_shim(pod.shim.argv).sandbox_id == "p1"
    options = [word for word in pod.shim.argv if re.fullmatch("-[a-z-]+", word)]
    assert options[:4] == ["-namespace", "-address", "-publish-binary", "-id"]


def test_its_children(pod: Pod) -> None:
    """QEMU and the file server, which has the sandbox's folder in its arguments."""
    assert (pod.qemu.comm, pod.qemu.parent) == ("qemu-system-x86", pod.shim_pid)
    if pod.virtiofsd is None:
        pytest.skip(f"no {VIRTIOFSD} here")
    assert (pod.virtiofsd.comm, pod.virtiofsd.parent) == ("virtiofsd", pod.shim_pid)
    shared = "kata-containers/shared/sandboxes/p1/shared"
    (source,) = (word for word in pod.virtiofsd.argv if word.startswith("source="))
    assert source.endswith(shared)


def test_qemus_command_line(pod: Pod) -> None:
    """What is read of it: the sandbox, one socket per vCPU, QMP by a descriptor, the pid file."""
    argv = pod.qemu.argv
    command = parse_qemu(argv)
    guest = command.guest
    assert (command.sandbox_id, command.iothreads, command.problems) == ("p1", (IOTHREAD,), ())
    shape = (guest.boot, guest.maximum, guest.sockets, guest.cores, guest.threads)
    assert shape == (2, 16, 16, 1, 1)
    assert argv[1:3] == ["-name", "sandbox-p1,debug-threads=on"]
    held, debug = (argv[place + 1] for place, word in enumerate(argv) if word == "-qmp")
    assert re.fullmatch(r"unix:fd=\d+,server=on,wait=off", held)
    assert debug == f"unix:path={pod.vc}/vm/p1/extra-monitor.sock,server=on,wait=off"
    assert argv[argv.index("-pidfile") + 1] == f"{pod.vc}/vm/p1/pid"
    assert argv[-2:] == ["-smp", "2,cores=1,threads=1,sockets=16,maxcpus=16"]


def test_hotplugged_vcpus(pod: Pod) -> None:
    """From the highest slot down, named in their order."""
    assert pod.plugged == [(15, "cpu-0"), (14, "cpu-1"), (13, "cpu-2"), (12, "cpu-3")]
