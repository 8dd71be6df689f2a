"""The broker through its socket: files, folders, watches and sockets of its table."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.boundary.broker import Channel, broker

LIMIT: Final = 1 << 20
CREATED: Final = 0x100  # IN_CREATE
PYTHON: Final = os.path.realpath(sys.executable)

_OF_CONTAINERD = "io.containerd.runtime.v2.task/k8s.io/c1/config.json"
FILES: Final[dict[str, tuple[str, list[int | str]]]] = {
    "bundle-config": ("c/c1/config.json", [0, "c1"]),
    "bundle-config-containerd": (f"c/{_OF_CONTAINERD}", [0, "k8s.io", "c1"]),
    "bundle-config-docker": (f"c/daemon/{_OF_CONTAINERD}", [0, "k8s.io", "c1"]),
    "bundle-config-crio": ("c/overlay-containers/c1/userdata/config.json", [0, "overlay", "c1"]),
    "bundle-config-userdata": ("c/c1/userdata/config.json", [0, "c1"]),
    "sandbox-state-go": ("vc/sbs/p1/persist.json", ["p1"]),
    "container-state-go": ("vc/sbs/p1/c1/persist.json", ["p1", "c1"]),
    "sandbox-state-rust": ("kata/p1/state.json", ["p1"]),
    "vmm-pid": ("vc/vm/p1/pid", ["p1"]),
    "jailed-vmm-pid": ("vc/firecracker/p1/root/firecracker.pid", ["firecracker", "p1"]),
    "monitor-socket": ("vc/vm/p1/qmp.sock", ["p1", "qmp"]),
    "kubelet-checkpoint": ("kubelet/cpu_manager_state", []),
    "cpu-claim": ("cdi/dra.example-claim.json", ["dra.example-claim"]),
}
"""By row its file below the test's folder, and the arguments that lead there but for the limit."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Every file of the table, with its row's name in it, beside what nobody may reach."""
    for name, (path, _) in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(name)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/persist.json").write_text("secret")
    return tmp_path


@pytest.fixture
def ask(tree: Path) -> Iterator[Channel]:
    """A broker that knows the tree."""
    with broker(**settings(tree)) as channel:
        yield channel


def settings(tree: Path) -> dict[str, Any]:
    """Return where things are."""
    return {
        **{name: str(tree / name) for name in ("vc", "kata", "cdi")},
        "kubelet_state": str(tree / "kubelet/cpu_manager_state"),
        "bundle_roots": [str(tree / "absent"), str(tree / "c")],
    }


def arguments(name: str, limit: int = LIMIT) -> list[int | str]:
    """Return the arguments of a file's row; the bundles' root is the second one."""
    others = FILES[name][1]
    return [limit, 1, *others[1:]] if name.startswith("bundle") else [limit, *others]


# ---- files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_table(name: str, tree: Path, ask: Channel) -> None:
    """Its status and its content; a link, a FIFO, what is too long, or not root's, is not read."""
    path = tree / FILES[name][0]
    reply, found = ask(name, *arguments(name)), path.stat()
    assert (reply.errno, reply.content) == (0, name.encode())
    assert reply.status == (
        *(found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_nlink),
        *(found.st_size, found.st_mtime_ns),
    )
    assert ask(name, *arguments(name, len(name))).content == name.encode()
    for limit in (0, len(name) - 1):
        reply = ask(name, *arguments(name, limit))
        assert (reply.content, reply.status.size) == (b"", len(name))
    if os.geteuid() == 0:
        os.chown(path, 4242, 4242)
        reply = ask(name, *arguments(name))
        assert (reply.content, reply.status.uid) == (b"", 4242)
    path.unlink()
    assert ask(name, *arguments(name)).errno == errno.ENOENT
    path.symlink_to(tree / "outside/persist.json")
    reply = ask(name, *arguments(name))
    assert (reply.content, stat.S_ISLNK(reply.status.mode)) == (b"", True)
    path.unlink()
    os.mkfifo(path)
    reply = ask(name, *arguments(name))
    assert (reply.content, stat.S_ISFIFO(reply.status.mode)) == (b"", True), "it is not opened"


@pytest.mark.parametrize("name", [name for name in FILES if FILES[name][1]])
def test_no_link_on_the_way(name: str, tree: Path, ask: Channel) -> None:
    """No folder between the setting's and the file may be one."""
    base, *folders = Path(FILES[name][0]).parent.parts
    for depth in range(1, len(folders) + 1):
        folder = tree.joinpath(base, *folders[:depth])
        aside = folder.with_name("aside")
        folder.rename(aside)
        folder.symlink_to(aside)
        assert ask(name, *arguments(name)).errno == errno.ENOTDIR, folder
        folder.unlink()
        aside.rename(folder)
    assert ask(name, *arguments(name)).content == name.encode()


def test_a_setting_may_be_a_link(tree: Path) -> None:
    """The administrator wrote it."""
    (tree / "alias").symlink_to(tree / "vc")
    with broker(vc=str(tree / "alias")) as ask:
        assert ask("sandbox-state-go", LIMIT, "p1").content == b"sandbox-state-go"


def test_bundles_and_nothing_below_them(tree: Path, ask: Channel) -> None:
    """config.json of a container; not one in its rootfs, and not one at another depth."""
    bundle = tree / f"c/{_OF_CONTAINERD}"
    for place in ("rootfs", "rootfs/etc"):
        (bundle.parent / place).mkdir()
        (bundle.parent / place / "config.json").write_text("the password of a registry")
    for name in ("bundle-config", "bundle-config-userdata"):
        for container in ("k8s.io", "io.containerd.runtime.v2.task", "rootfs", "userdata"):
            assert ask(name, LIMIT, 1, container).errno == errno.ENOENT
    containerd = "bundle-config-containerd"
    assert ask(containerd, LIMIT, 1, "k8s.io", "rootfs").errno == errno.ENOENT
    assert ask(containerd, LIMIT, 0, "k8s.io", "c1").errno == errno.ENOENT, "a root that is absent"
    assert ask(containerd, LIMIT, 2, "k8s.io", "c1").errno == errno.ENODEV, "no such root"


# ---- folders -----------------------------------------------------------------------------


def test_names_in_folders(tree: Path, ask: Channel) -> None:
    """Of sandboxes folders alone, links to some not among them; of claims all names."""
    (tree / "vc/sbs/p2").mkdir()
    (tree / "vc/sbs/linked").symlink_to(tree / "outside")
    (tree / "vc/sbs/file").touch()
    assert set(ask("sandboxes-go").value) == {"p1", "p2"}
    assert ask("sandboxes-rust").value == ["p1"]
    assert ask("cpu-claims").value == ["dra.example-claim.json"]
    shutil.rmtree(tree / "kata")
    assert ask("sandboxes-rust").errno == errno.ENOENT
    with broker() as without:
        assert without("sandboxes-go").errno == errno.ENODEV


def test_the_status_of_folders(tree: Path, ask: Channel) -> None:
    """Of four folders and those above them, up to the root."""
    for place, folder in enumerate(("vc/sbs", "kata", "cdi", "kubelet")):
        above = (tree / folder, *(tree / folder).parents)
        for levels in range(len(above)):
            assert ask("folder-status", place, levels).status.inode == above[levels].stat().st_ino
        assert ask("folder-status", place, 64).status.inode == os.stat("/").st_ino


# ---- watches -----------------------------------------------------------------------------


@pytest.fixture
def inotify() -> Iterator[int]:
    """A descriptor of inotify, the daemon's own."""
    fd = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0
    yield fd
    os.close(fd)


WATCHES: Final[dict[str, tuple[str, list[int | str]]]] = {
    "vc/sbs/p1": ("watch-sandbox-go", ["p1"]),
    "kata/p1": ("watch-sandbox-rust", ["p1"]),
    "vc/sbs": ("watch-folder", [0, 0]),
    "kata": ("watch-folder", [1, 0]),
    "cdi": ("watch-folder", [2, 0]),
    "kubelet": ("watch-folder", [3, 0]),
    "vc": ("watch-folder", [0, 1]),
    "": ("watch-folder", [0, 2]),
}
"""By folder the row that watches it, and its arguments after the mask."""


@pytest.mark.parametrize("folder", WATCHES)
def test_watches(folder: str, tree: Path, ask: Channel, inotify: int) -> None:
    """Events of new files in the folder arrive at the daemon's own descriptor."""
    name, values = WATCHES[folder]
    reply = ask(name, CREATED, *values, fds=[inotify])
    (watch,) = struct.unpack("=I", reply.data)
    (tree / folder / "news").touch()
    number, mask, _, length = struct.unpack_from("=iIII", os.read(inotify, 4096))
    assert (number, mask, length) == (watch, CREATED, 16)


def test_what_is_not_watched(tree: Path, ask: Channel, inotify: int) -> None:
    """Nothing that shows who reads; no link; nothing without a descriptor of inotify, or with two.

    The broker keeps none of them.
    """
    before = len(os.listdir(f"/proc/{ask.pid}/fd"))
    for mask in (0x1, 0x10, 0x20, 0xFFF, 0x8000_0000):
        assert ask("watch-sandbox-go", mask, "p1", fds=[inotify]).errno == errno.EINVAL
        assert ask("watch-folder", mask, 0, 0, fds=[inotify]).errno == errno.EINVAL
    assert ask("watch-sandbox-go", CREATED, "p1").errno == errno.EINVAL
    assert ask("watch-sandbox-go", CREATED, "p1", fds=[inotify] * 2).errno == errno.EINVAL
    assert ask("watch-folder", CREATED, 0, 0).errno == errno.EINVAL
    with open(os.devnull, "rb") as null:
        assert ask("watch-folder", CREATED, 0, 0, fds=[null.fileno()]).errno == errno.EINVAL
    assert ask("watch-sandbox-go", CREATED, "absent", fds=[inotify]).errno == errno.ENOENT
    (tree / "vc/sbs/linked").symlink_to(tree / "outside")
    watched = ask("watch-sandbox-go", CREATED, "linked", fds=[inotify])
    (tree / "outside/news").touch()
    with pytest.raises(BlockingIOError):
        os.read(inotify, 4096)
    assert watched.errno == 0, "the link itself is"
    assert len(os.listdir(f"/proc/{ask.pid}/fd")) == before


# ---- sockets -----------------------------------------------------------------------------


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(4)
        yield server


@pytest.mark.parametrize(
    ("name", "values", "path"),
    [
        ("agent-cloud-hypervisor", ["p1"], "vc/vm/p1/clh.sock"),
        ("agent-firecracker", ["fc", "p1"], "vc/fc/p1/root/kata.hvsock"),
    ],
)
def test_an_agent_is_behind_a_vmm(name: str, values: list[str], path: str, tree: Path) -> None:
    """The exact socket of a sandbox, where a VMM listens; nobody else's, whatever its path."""
    with listening(tree / path) as server:
        with broker(**settings(tree)) as ask:
            assert ask.refusals(name, *values) == errno.EACCES, "this test is no VMM"
            server.accept()[0].close()
        with broker(**settings(tree), vmms=[PYTHON]) as ask:
            with socket.socket(fileno=ask.handed(name, *values)) as ours:
                peer, _ = server.accept()
                with peer:
                    ours.sendall(b"CONNECT 1024\n")
                    assert peer.recv(100) == b"CONNECT 1024\n"
            (tree / path).unlink()
            assert ask.refusals(name, *values) == errno.ENOENT
            (tree / path).touch()
            assert ask.refusals(name, *values) == errno.ENOTSOCK
            (tree / path).unlink()
            with listening(tree / "other.sock"):
                (tree / path).symlink_to(tree / "other.sock")
                assert ask.refusals(name, *values) == errno.ENOTSOCK, "a link is not followed"


@pytest.mark.parametrize("name", ["nri", "cri", "pods"])
def test_servers_are_those_of_the_settings(name: str, tree: Path) -> None:
    """A connection that equals root is made only where the administrator named root's socket."""
    path = tree / "outside/server.sock"
    with (
        listening(path) as server,
        broker(**settings(tree), **dict[str, Any]({name: str(path)})) as ask,
    ):
        with socket.socket(fileno=ask.handed(name)) as ours:
            peer, _ = server.accept()
            with peer:
                ours.sendall(b"x")
                assert peer.recv(9) == b"x"
        for other in {"nri", "cri", "pods"} - {name}:
            assert ask.refusals(other) == errno.EACCES
        if os.geteuid() == 0:
            os.chown(path, 4242, 4242)
            assert ask.refusals(name) == errno.EACCES


def test_a_server_with_a_full_backlog_is_not_waited_for(tree: Path) -> None:
    """The broker answers at once, and goes on."""
    path = tree / "server.sock"
    with socket.socket(socket.AF_UNIX) as server, broker(nri=str(path)) as ask:
        server.bind(str(path))
        server.listen(0)
        taken = [ask("nri") for _ in range(3)]
        assert taken[-1].errno == errno.EAGAIN
        assert ask("executable", os.getpid()).errno == 0
        for reply in taken:
            for fd in reply.descriptors:
                os.close(fd)


@pytest.fixture
def irqbalance(tmp_path: Path) -> Path:
    """A folder in the place of /run, with irqbalance's in it."""
    folder = tmp_path / "run/irqbalance"
    folder.mkdir(parents=True, mode=0o755)
    return folder


@pytest.mark.root
def test_irqbalance_is_asked_as_root(irqbalance: Path) -> None:
    """Its own format, with the credentials that it looks at; one request per connection."""
    mounts = {"/run": irqbalance.parent}
    with listening(irqbalance / "irqbalance7.sock") as server, broker(mounts, quiet="irq") as ask:
        for banned, text in (("?", b"setup"), ("=2,5-7", b"settings cpus 2,5-7"),
                             ("=", b"settings cpus NULL")):  # fmt: skip
            with socket.socket(fileno=ask.handed("irqbalance", 7, banned)) as ours:
                end, _ = server.accept()
                with end:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                    data, [(_, kind, credentials)], _, _ = end.recvmsg(100, 100)
                    assert (data, kind) == (text, socket.SCM_CREDENTIALS)
                    assert struct.unpack("=iII", credentials)[:2] == (ask.pid, 0)
                    end.sendall(b"SLEEP 10")
                    assert ours.recv(100) == b"SLEEP 10"
        for banned in ("", "!", "?1", "=x", "=0;1", "=1; ban irqs 3"):
            assert ask.refusals("irqbalance", 7, banned) == errno.EINVAL, banned
        assert ask.refusals("irqbalance", 8, "?") == errno.ENOENT


@pytest.mark.root
@pytest.mark.parametrize("change", [0o777, 0o775, -1], ids=["all", "group", "owner"])
def test_anybodys_irqbalance_is_not_asked(irqbalance: Path, change: int) -> None:
    """Its folder is root's alone."""
    if change < 0:
        os.chown(irqbalance, 4242, 4242)
    else:
        irqbalance.chmod(change)
    mounts = {"/run": irqbalance.parent}
    with listening(irqbalance / "irqbalance7.sock"), broker(mounts, quiet="irq") as ask:
        assert ask.refusals("irqbalance", 7, "?") == errno.EACCES


@pytest.mark.root
@pytest.mark.parametrize("execs", [0, 1])
def test_process_events(execs: int) -> None:
    """A socket of the process connector that has been asked for forks, exits, and programs."""
    with broker(thread_events=True) as ask:
        fd = ask.handed("process-events", 77, execs)
    with socket.socket(fileno=fd) as events, subprocess.Popen(["true"]) as process:
        process.wait()
        seen: set[int] = set()
        events.settimeout(10)
        while 0x8000_0000 not in seen:  # its exit
            data = events.recv(4096)
            (kind,) = struct.unpack_from("=I", data, 36)
            if process.pid in struct.unpack_from("=4I", data.ljust(100, b"\0"), 52):
                seen.add(kind)
    assert 0x1 in seen, "its fork"
    assert (0x2 in seen) >= bool(execs), "its program"


def test_programs_of_the_settings(tree: Path) -> None:
    """A program that fits its pattern, or its folder; no other file of that folder."""
    program = tree / "outside/qemu-system-x"
    shutil.copy("/bin/sleep", program)
    with broker(vmms=[f"{tree}/outside/qemu-*"], shims=[f"{tree}/vc/shim"]) as ask:
        assert ask("program", 0, "qemu-system-x").status.inode == program.stat().st_ino
        assert ask("program", 0, "").status.inode == program.parent.stat().st_ino
        assert ask("program", 1, "").status.inode == (tree / "vc").stat().st_ino
        assert ask("program", 0, "persist.json").errno == errno.EACCES
        assert ask("program", 1, "sbs").errno == errno.EACCES
        assert ask("program", 2, "qemu-system-x").errno == errno.ENODEV
