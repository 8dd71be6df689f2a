"""What unprivileged processes and single hostile sandboxes do while others' hooks come (D23).

Each attack is a context manager over a Scene; within its block it is under way. `settings` are what
the daemon's configuration needs for it. Audits are short, so that a minute shows what a day would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.bench.figures import Row, count_row
from tests.bench.node import BenchNode
from tests.bench.service import KATA_PIN, ServiceProcess, service
from tests.bench.standins import StandIns, program
from tests.chaos import traffic
from tests.chaos.traffic import Traffic
from tests.support.fuse import FaultyFiles
from tests.support.qemu import QEMU, Machine
from tests.support.waiting import wait_for

HEALTHY: Final = 3
SMALL: Final = Machine(boot=2, maximum=2)
STRANGER: Final = 4242
STRANGERS: Final = 300
PRIORITY: Final = -10
"""Of daemon, hooks and attackers alike, so that other work on the machine disturbs no figure."""
AUDITS: Final = {"affinity_s": 1, "deep_s": 2}
READERS_GROUP: Final = ("nogroup", 65534)


@dataclass(frozen=True)
class Scene:
    """Where an attack takes place."""

    node: BenchNode
    daemon: ServiceProcess


@dataclass(frozen=True)
class Attack:
    """One attack; `crowd` is how many stand-ins for idle VMs the node has beside the healthy.

    `descriptors` is how many the daemon may have, 0 for as many as usual. `served` is whether hooks
    and pings must be answered in time meanwhile, beside none being lost.
    """

    under_way: Callable[[Scene], AbstractContextManager[None]]
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    crowd: int = 0
    served: bool = True
    descriptors: int = 0


def measure(name: str, hooks: int) -> Iterator[Row]:
    """Yield the rows of one attack with so many hooks, a quarter of them before it begins."""
    attack = ATTACKS[name]
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with BenchNode() as node, contextlib.closing(StandIns(node)) as stand_ins:
        node.root.chmod(0o711)  # others may come as far as the sockets, as below /run
        stand_ins.grow(attack.crowd)
        node.start(HEALTHY, SMALL, prefix="healthy")
        settings = {
            "audit": AUDITS, "nri": {"enabled": "no"}, "hypervisors": [QEMU, str(program(node))],
            **attack.settings,
        }  # fmt: skip
        limit = ("prlimit", f"--nofile={attack.descriptors}") if attack.descriptors else ()
        with service(node, (*limit, *KATA_PIN), **settings) as daemon:
            hooking = Traffic(node, node.sandboxes)
            calm = hooking.run(daemon, max(8, hooks // 4))
            with attack.under_way(Scene(node, daemon)):
                stormy = hooking.run(daemon, hooks)
            missing = traffic.lost(node, [*calm.sent, *stormy.sent])
            log = daemon.log
    yield from traffic.rows(name, stormy, calm, missing, served=attack.served)
    bare = [line for line in log.splitlines() if "Traceback" in line or "[Errno" in line]
    detail = bare[0][:120] if bare else ""
    logged = f"{name}: tracebacks and bare errnos logged"
    yield count_row(logged, len(bare), len(log.splitlines()), detail)


_SPAWNING = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support import stopped
for number in range(int(sys.argv[4])):
    argv = [sys.argv[2], "-name", f"sandbox-stranger{number}", "-smp", "4096"]
    print(stopped.start([*argv, *("-numa", "cpu") * 8180], uid=int(sys.argv[3])), flush=True)
"""
"""A process that ends: a stranger is no child of ours, whom this node's configuration believes."""


@contextlib.contextmanager
def strangers(scene: Scene) -> Iterator[None]:
    """300 processes of an unprivileged user that look like QEMU, each with 82 KiB of arguments.

    They run the host's own QEMU, so that its path and its inode are right.
    """
    del scene
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-c", _SPAWNING, root, QEMU, str(STRANGER), str(STRANGERS)]
    pids: list[int] = []
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as spawner:
            assert spawner.stdout is not None
            # Not to the end of the pipe: the strangers hold it too.
            pids.extend(int(spawner.stdout.readline()) for _ in range(STRANGERS))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(traffic.runs, pids)), "the strangers to end")


_CROWDED = """
import os, sys, threading, time
threading.stack_size(65536)
for _ in range(4000):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("up", flush=True)
while True:
    time.sleep(0.005)
    threading.Thread(target=time.sleep, args=(0.05,), daemon=True).start()
"""


@contextlib.contextmanager
def threads(scene: Scene) -> Iterator[None]:
    """One accepted VMM with 4,000 threads, and a new one every 5 ms."""
    node = scene.node
    argv = [str(program(node)), "-ISc", _CROWDED, "-name", "sandbox-crowded", "-smp", "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            container = node.container("crowded", cpus=str(node.last_cpu))
            traffic.hook(node, "createRuntime", container.state(process.pid))
            yield
        finally:
            process.kill()


_READING = """
import os, select, socket, sys
path, count, uid, gid = sys.argv[1], *map(int, sys.argv[2:5])
os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
request = b'{"version": 1, "verb": "state"}\\n' * 64
def connected():
    one = socket.socket(socket.AF_UNIX)
    try:
        one.connect(path)
    except OSError:
        one.close()
        return None
    one.setblocking(False)
    return one
print("up", flush=True)
peers = []
while True:
    while len(peers) < count and (one := connected()):
        peers.append(one)
    readable, writable, _ = select.select(peers, peers, [], 0.1)
    for one in {*readable, *writable}:
        try:
            if one in readable and not one.recv(1 << 20):
                raise ConnectionError
            if one in writable:
                one.send(request)
        except BlockingIOError:
            continue
        except OSError:
            one.close()
            peers.remove(one)
"""


@contextlib.contextmanager
def readers(scene: Scene) -> Iterator[None]:
    """31 clients of one member of the group, each asking for the state as fast as it can."""
    os.chown(scene.node.runtime_dir, -1, READERS_GROUP[1])  # as systemd-tmpfiles makes it
    path = str(scene.node.runtime_dir / "status.sock")
    ids = ("31", str(STRANGER), str(READERS_GROUP[1]))
    argv = [sys.executable, "-ISc", _READING, path, *ids]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def sigstop(scene: Scene) -> Iterator[None]:
    """Clients of every socket that stop in the middle of a request, or of an answer."""
    runtime_dir = scene.node.runtime_dir
    halves = {
        "hook.sock": b"KP1 createRuntime 5 7 900000\n{",
        "control.sock": b'{"version": 1, "verb": "state"}\n' * 400,
        "status.sock": b'{"version": 1, "verb": "sta',
    }
    body = (
        "import os, signal, socket, sys\n"
        "held = []\n"
        "for _ in range(10):\n"
        "    one = socket.socket(socket.AF_UNIX); one.connect(sys.argv[1]); held.append(one)\n"
        "    one.setblocking(False)\n"
        "    try: one.send(bytes.fromhex(sys.argv[2]))\n"
        "    except BlockingIOError: pass\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    with contextlib.ExitStack() as closing:
        for name, half in list(halves.items()) * 3:
            argv = [sys.executable, "-ISc", body, str(runtime_dir / name), half.hex()]
            process = closing.enter_context(subprocess.Popen(argv))
            closing.callback(process.kill)
            wait_for(lambda: _is_stopped(process.pid), "a client to stop")  # noqa: B023 - at once
        yield


_LOCKING = """
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
page = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, os.open(sys.argv[1], os.O_RDONLY), 0)
memory = os.open("/proc/self/mem", os.O_RDONLY)
print("up", flush=True)
sys.stdin.readline()
threading.Thread(target=os.pread, args=(memory, 8, page), daemon=True).start()
time.sleep(0.1)
libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
"""
"""One thread reads a page that never comes, holding the memory map; another waits to change it.

Whoever reads the command line then waits behind both, in a state that no signal but SIGKILL ends.
"""


@contextlib.contextmanager
def locked(scene: Scene) -> Iterator[None]:
    """An accepted VMM and an unprivileged process of a pod, both with their memory map locked.

    The pod has its own file in the place of the host's QEMU.
    """
    node = scene.node
    with FaultyFiles(node.root / "hung", {"page": bytes(4096)}) as files:
        files.hang.add("page")
        page = str(files.path / "page")
        arguments = ["-ISc", _LOCKING, page]
        vmm = [str(program(node)), *arguments, "-name", "sandbox-locked", "-smp", "2"]
        pod = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
        pod += [str(program(node)), QEMU, "setpriv", f"--reuid={STRANGER}", "--clear-groups"]
        pod += [QEMU, *arguments, "-name", "sandbox-stranger", "-smp", "2"]
        with contextlib.ExitStack() as closing:
            processes = [
                closing.enter_context(
                    subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                )
                for argv in (vmm, pod)
            ]
            for process in processes:
                closing.callback(process.kill)
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
            container = node.container("locked", cpus=str(node.last_cpu))
            traffic.hook(node, "createRuntime", container.state(processes[0].pid))
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"now\n")
                process.stdin.flush()
            yield
            files.close()


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] == b"T"


@contextlib.contextmanager
def emfile(scene: Scene) -> Iterator[None]:
    """Clients that take every descriptor the daemon may have."""
    body = (
        "import socket, sys, time\n"
        "held = []\n"
        "while True:\n"
        "    for path in sys.argv[1:]:\n"
        "        one = socket.socket(socket.AF_UNIX); one.settimeout(0.05)\n"
        "        try: one.connect(path)\n"
        "        except OSError: pass\n"
        "        held.append(one)\n"
        "    if len(held) > 200:\n"
        "        for one in held: one.close()\n"
        "        held.clear()\n"
        "    time.sleep(0.002)\n"
    )
    path = str(scene.node.runtime_dir / "status.sock")
    with subprocess.Popen([sys.executable, "-ISc", body, path]) as process:
        try:
            yield
        finally:
            process.kill()


ATTACKS: Final[dict[str, Attack]] = {
    "strangers": Attack(strangers, "300 strangers with command lines of 82 KiB"),
    "threads": Attack(threads, "a VMM with 4,000 threads and births every 5 ms"),
    "locked": Attack(locked, "a VMM and a stranger whose memory maps are locked"),
    "readers": Attack(
        readers, "31 clients that pipeline `state`", {"group": READERS_GROUP[0]}, crowd=150
    ),
    "sigstop": Attack(sigstop, "90 stopped clients that hold sockets"),
    "emfile": Attack(emfile, "clients that take every descriptor", served=False, descriptors=48),
}
