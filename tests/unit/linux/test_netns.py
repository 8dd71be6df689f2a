"""Interfaces of a VMM: what descriptors and workers say, and how they are paired."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kata_pin
from kata_pin.base.documents.state import Interface, VhostWorker
from kata_pin.base.errors import TaskGone
from kata_pin.base.sandbox import PF_KTHREAD, PF_USER_WORKER
from kata_pin.linux.descriptors import Descriptors, read_descriptors
from kata_pin.linux.network import NetLink, combine, read_workers
from tests.support.hosttree import FakeHost

PID = 100

LO = NetLink(1, "lo", "", 1)
ETH0 = NetLink(2, "eth0", "veth", 2, lower=77, redirects=(3,))
TAP0 = NetLink(3, "tap0_kata", "tap", 0, redirects=(2,))
ETH1 = NetLink(4, "eth1", "veth", 2, redirects=(5,))
TAP1 = NetLink(5, "tap1_kata", "tap", 0, redirects=(4,))
MACVTAP = NetLink(6, "tap2_kata", "macvtap", 1, lower=2)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host with a VMM of three threads."""
    host = FakeHost(tmp_path)
    host.process(PID, comm="qemu-system-x86", threads=3)
    return host


def _open(host: FakeHost, number: int, target: str, fdinfo: str = "pos:\t0\n") -> None:
    home = host.folder / "proc" / str(PID)
    for name in ("fd", "fdinfo"):
        (home / name).mkdir(exist_ok=True)
    (home / "fd" / str(number)).symlink_to(target)
    (home / "fdinfo" / str(number)).write_text(fdinfo)


def _served(
    links: list[NetLink], queues: tuple[str | int, ...], vhosts: list[str], workers: list[int]
) -> dict[str, tuple[VhostWorker, ...]]:
    """Return the workers of each interface that is served."""
    found = combine(links, Descriptors(queues, tuple(vhosts)), workers, shared=False)
    return {one.name: one.served_by for one in found if one.served_by}


def _sure(*tids: int) -> tuple[VhostWorker, ...]:
    return tuple(VhostWorker(tid, inferred=False) for tid in tids)


def _inferred(*tids: int) -> tuple[VhostWorker, ...]:
    return tuple(VhostWorker(tid, inferred=True) for tid in tids)


NET, VSOCK = "vhost-net", "vhost-vsock"


@pytest.mark.parametrize(
    ("links", "queues", "vhosts", "workers", "served"),
    [
        pytest.param(
            [ETH0, TAP0], ("tap0_kata",), [NET], [11], {"tap0_kata": _sure(11)}, id="one"
        ),
        pytest.param(
            [ETH0, TAP0],
            ("tap0_kata", "tap0_kata"),
            [NET, NET],
            [11, 12],
            {"tap0_kata": _sure(11, 12)},
            id="two queues of one interface",
        ),
        pytest.param(
            [ETH0, TAP0],
            ("tap0_kata", "tap0_kata"),
            [VSOCK, NET, NET],
            [11, 12, 13],
            {"tap0_kata": _inferred(12, 13)},
            id="the vsock's worker is left out by order only",
        ),
        pytest.param(
            [ETH0, TAP0, ETH1, TAP1],
            ("tap0_kata", "tap1_kata"),
            [NET, NET],
            [11, 12],
            {"tap0_kata": _inferred(11), "tap1_kata": _inferred(12)},
            id="two interfaces",
        ),
        pytest.param(
            [ETH0, TAP0], ("tap0_kata",), [NET, NET], [11], {"tap0_kata": _sure(11)},
            id="one interface, whatever the numbers",
        ),
        pytest.param(
            [ETH0, TAP0], ("tap0_kata",), [VSOCK, NET], [11], {}, id="a worker is missing"
        ),
        pytest.param(
            [TAP0, TAP1], ("tap0_kata", "tap1_kata"), [NET], [11], {}, id="a queue without vhost"
        ),
        pytest.param([ETH0, MACVTAP], (6,), [NET], [11], {"tap2_kata": _sure(11)}, id="macvtap"),
        pytest.param([ETH0, TAP0], ("tap0_kata",), [], [], {}, id="no vhost"),
        pytest.param([ETH0], ("gone",), [NET], [11], {}, id="a link that is gone"),
    ],
)  # fmt: skip
def test_which_worker_serves_which_interface(
    links: list[NetLink],
    queues: tuple[str | int, ...],
    vhosts: list[str],
    workers: list[int],
    served: dict[str, tuple[VhostWorker, ...]],
) -> None:
    """Certain where only one answer is possible, inferred by number, or not said."""
    assert _served(links, queues, vhosts, workers) == served


def test_links_and_their_peers() -> None:
    """A tap and its veth point at each other; loopback is left out; queues are those in use."""
    found = combine([LO, ETH0, TAP0], Descriptors(("tap0_kata",) * 2), (), shared=False)
    assert found == (
        Interface("eth0", "veth", 2, peer="tap0_kata"),
        Interface("tap0_kata", "tap", 2, peer="eth0", attached=True),
    )


def test_macvtap_points_at_its_lower_device() -> None:
    """And the device back at it, where it has no peer of its own."""
    found = combine([NetLink(2, "eth0", "veth", 1), MACVTAP], Descriptors(), (), shared=False)
    assert [(one.name, one.peer) for one in found] == [
        ("eth0", "tap2_kata"),
        ("tap2_kata", "eth0"),
    ]


def test_a_shared_namespace_shows_its_own_only() -> None:
    """In the host's namespace, what the VMM has open, and its peer."""
    found = combine([LO, ETH0, TAP0, ETH1, TAP1], Descriptors(("tap1_kata",)), (), shared=True)
    assert [one.name for one in found] == ["eth1", "tap1_kata"]


def test_names_are_printable() -> None:
    """A VMM with CAP_NET_ADMIN may put an escape sequence into a name."""
    (found,) = combine([NetLink(2, "t\x1b[31m", "tap", 1)], Descriptors(), (), shared=False)
    assert found.name == "t?[31m"


def test_descriptors(host: FakeHost) -> None:
    """In the order of their numbers; a tun descriptor without an interface has no queue."""
    _open(host, 12, "/dev/net/tun", "pos:\t0\nflags:\t0104002\niff:\ttap0_kata\n")
    _open(host, 7, "/dev/vhost-vsock")
    _open(host, 13, "/dev/net/tun", "iff:\t\n")
    _open(host, 14, "/dev/tap6")
    _open(host, 15, "/dev/vhost-net")
    _open(host, 16, "/tmp/vhost-net")
    assert read_descriptors(host.root, PID) == Descriptors(("tap0_kata", 6), (VSOCK, NET))


def test_workers_among_the_threads(host: FakeHost) -> None:
    """Linux 6.4 and later, in the order of their creation; a name alone makes no worker."""
    host.thread(PID, 300, comm=f"vhost-{PID + 1}", flags=PF_USER_WORKER, starttime=200)
    host.thread(PID, 200, comm=f"vhost-{PID}", flags=PF_USER_WORKER, starttime=201)
    host.thread(PID, 400, comm=f"vhost-{PID}")
    host.thread(PID, 500, comm="kvm-nx-lpage-re", flags=PF_USER_WORKER)
    assert read_workers(host.root, PID, 2) == (300, 200)


def test_workers_among_the_kernel_threads(host: FakeHost) -> None:
    """Before Linux 6.4, named after any thread of the VMM and not older than it."""
    host.process(600, comm=f"vhost-{PID + 2}", ppid=2, flags=PF_KTHREAD, starttime=100)
    host.process(601, comm=f"vhost-{PID}", ppid=2, flags=PF_KTHREAD, starttime=99)
    host.process(602, comm=f"vhost-{PID + 3}", ppid=2, flags=PF_KTHREAD)
    host.process(603, comm=f"kvm-pit/{PID}", ppid=2, flags=PF_KTHREAD)
    assert read_workers(host.root, PID, 1) == (600,)
    assert read_workers(host.root, PID, 0) == ()


def test_nobody(host: FakeHost) -> None:
    """A process that is gone is TaskGone."""
    with pytest.raises(TaskGone):
        read_descriptors(host.root, 4242)


@pytest.mark.parametrize("module", ["kata_pin.service.app", "kata_pin.cli.main"])
def test_psutil_and_pyroute2_are_imported_by_the_call_alone(module: str) -> None:
    """pyroute2 costs 0.1 s and 20 MiB: neither the daemon nor the command line starts with it."""
    code = (
        f"import sys, {module}, kata_pin.linux.network;"
        "print([m for m in ('psutil', 'pyroute2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_daemon_never_reads_networks() -> None:
    """Its event loop would wait for netlink, and its memory grow by pyroute2's 20 MiB."""
    folder = Path(kata_pin.__file__).parent / "service"
    assert [path for path in folder.rglob("*.py") if "netns" in path.read_text()] == []
