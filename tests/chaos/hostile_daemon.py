"""A daemon that was taken over: what its broker does for it, request by request.

It sends what it likes over the broker's socket: every row with wrong arguments, good requests with
bytes changed, and the attacks that once worked. Around it lie the things that it wants, each with a
marker in it; sockets of others note who connects. `Spoils` says what it got.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from kata_pin.base.config.tree import Config, Nri, NriEnabled, Paths
from kata_pin.rights.broker.protocol import (
    ANSWER,
    MAX_MESSAGE,
    REQUEST,
    Settings,
    parse_settings,
)
from kata_pin.rights.broker.rows import BY_NAME, NUMBERS, ROWS, Number, Rest, TextArgument, Value
from kata_pin.rights.broker.threads import COMMANDS
from kata_pin.service import privileges
from kata_pin.service.privileges import Broker, brokered
from tests.bench.figures import Row, count_row
from tests.chaos.fuzz.seeds import broker_requests

SECRET: Final = b"the password of a registry, or anything else"
TASK: Final = "io.containerd.runtime.v2.task/k8s.io/c1"
EVIL: Final = (
    *("..", ".", "", "/", "../..", "a/b", "c1/rootfs", "rootfs", "c1/../c1", "rootfs/etc", "p1"),
    *("containerd", "containerd.sock", "s", "config", "config.json", "password", "podman", "etc"),
    *("c1", "k8s.io", "io.containerd.runtime.v2.task", "qmp", "linked", "x" * 128, "x" * 129),
    *("p1\0", "p1\n", "-", "%s", "{vc}", "{0}", "~", "proc", "self", "1000"),
)

_REPLY: Final = b'{"return": []}\r\n'
_GREETING: Final = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'


class Prey:
    """What a hostile daemon wants, in a folder of its own; `near` are sockets of others."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.run = home / "run" / "containerd"
        self.vc = home / "vc"
        self.kata = home / "kata"
        bundle = self.run / TASK
        for path in (
            *(bundle / "rootfs" / "config.json", bundle / "rootfs" / "etc" / "config.json"),
            *(bundle / "rootfs" / "userdata" / "config.json", bundle / "password"),
            *(self.run / "config.json", home / "etc" / "config.json", home / "etc" / "shadow"),
            *(self.vc / "sbs" / "p1" / "secret", self.vc / "persist.json", home / "persist.json"),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(SECRET)
        (bundle / "config.json").write_text("{}")
        (self.vc / "sbs" / "p1" / "persist.json").write_text("{}")
        (self.vc / "sbs" / "linked").symlink_to(home / "etc")
        (self.run / "linked").symlink_to(home / "etc")
        self.kata.mkdir()
        self.sockets = (
            *(self.run / "containerd.sock", self.run / "s" / "0123abcd", self.run / "containerd"),
            *(bundle / "rootfs" / "run.sock", bundle / "rootfs" / "clh.sock"),
            *(home / "users" / "1000" / "podman" / "podman.sock", home / "nri.sock"),
            *(self.vc / "vm" / "p1" / "shim-monitor.sock", self.kata / "p1" / "shim-monitor.sock"),
        )
        self.monitor = self.vc / "vm" / "p1" / "qmp.sock"

    def settings(self) -> Config:
        """Return the default settings, for these folders."""
        paths = Paths(
            vc=str(self.vc),
            kata=str(self.kata),
            cdi=str(self.home / "cdi"),
            debugfs=str(self.home / "debug"),
            kubelet_state=str(self.home / "kubelet" / "cpu_manager_state"),
            bundle_roots=(str(self.run),),
            kata_configs=(),
        )
        off = Nri(enabled=NriEnabled.NO, socket=str(self.home / "nri.sock"))
        return Config(paths=paths, nri=off)

    def of_broker(self) -> Settings:
        """Return what a broker makes of them."""
        return parse_settings(privileges._settings(self.settings()).pack())


@dataclass
class Spoils:
    """What a hostile daemon got."""

    asked: int = 0
    granted: int = 0
    secrets: list[str] = field(default_factory=list)
    connected: list[str] = field(default_factory=list)
    commands: list[bytes] = field(default_factory=list)
    """What QEMU's monitor was sent, beside what the table has."""
    out_of_step: int = 0

    @property
    def found(self) -> list[str]:
        """All of it that it should not have."""
        late = ["answers out of step"] if self.out_of_step else []
        return [*self.secrets, *self.connected, *map(repr, self.commands), *late]


class HostileDaemon:
    """Asks a running broker, without any check of its own."""

    def __init__(self, broker: Broker, spoils: Spoils) -> None:
        self._channel = broker.calls._channel
        self._spoils = spoils
        self._number = 0

    def send(self, row: int, data: bytes, channel: socket.socket | None = None) -> bytes | None:
        """Send a request; return the answer's bytes, None where it was refused."""
        end = channel or self._channel
        self._number = (self._number + 1) & 0xFFFF_FFFF
        end.send(REQUEST.pack(row, self._number) + data)
        message, descriptors, _, _ = socket.recv_fds(end, MAX_MESSAGE, 4)
        number, errno = ANSWER.unpack_from(message)
        self._spoils.asked += 1
        self._spoils.out_of_step += number != self._number
        self._spoils.granted += not errno
        for fd in descriptors:
            self._look(ROWS[row % len(ROWS)].name, fd)
        if SECRET in message:
            self._spoils.secrets.append(f"{row}: {data!r}")
        return None if errno else message[ANSWER.size :]

    def ask(self, name: str, values: Mapping[str, Value]) -> bytes | None:
        """Ask for a row by its name, with any values that can be packed."""
        return self.send(NUMBERS[name], pack(name, values))

    def child(self, kind: str) -> socket.socket:
        """Return a connection to a new child."""
        self._number += 1
        data = BY_NAME["child"].pack({"kind": kind})
        self._channel.send(REQUEST.pack(NUMBERS["child"], self._number) + data)
        _, (fd,), _, _ = socket.recv_fds(self._channel, MAX_MESSAGE, 4)
        return socket.socket(fileno=fd)

    def _look(self, name: str, fd: int) -> None:
        """Note a connection to somebody else, or a secret in memory; close what was handed over."""
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(fileno=fd) as end:
                if end.family == socket.AF_UNIX and end.getpeername():
                    self._spoils.connected.append(f"{name}: {end.getpeername()!r}")
            return
        if stat.S_ISREG(mode) and SECRET in os.pread(fd, 1 << 23, 0):
            self._spoils.secrets.append(name)
        os.close(fd)


def pack(name: str, values: Mapping[str, Value]) -> bytes:
    """Return the bytes of arguments, whatever they are."""
    data = b""
    for argument in BY_NAME[name].arguments:
        value = values.get(argument.name, 0 if isinstance(argument, Number) else "")
        if isinstance(argument, Number):
            data += (int(value) & 0xFFFF_FFFF).to_bytes(4, sys.byteorder)
        else:
            text = value if isinstance(value, bytes) else str(value).encode()
            size = b"" if isinstance(argument, Rest) else len(text).to_bytes(2, sys.byteorder)
            data += size + text
    return data


@contextlib.contextmanager
def hunted() -> Iterator[tuple[Prey, Broker, Spoils]]:
    """Run a broker beside its prey, whose sockets listen for the block."""
    home = Path(tempfile.mkdtemp(prefix="hostile-"))
    spoils = Spoils()
    try:
        prey = Prey(home)
        with contextlib.ExitStack() as stack:
            for path in prey.sockets:
                stack.enter_context(_listening(path, spoils))
            stack.enter_context(_monitor(prey.monitor, spoils))
            yield prey, stack.enter_context(brokered(prey.settings())), spoils
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _listening(path: Path, spoils: Spoils) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        yield
        return
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(64)
        server.setblocking(False)
        yield
        with contextlib.suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                spoils.connected.append(str(path))


@contextlib.contextmanager
def _monitor(path: Path, spoils: Spoils) -> Iterator[None]:
    """Play a QEMU that does whatever it is told, and notes what nobody should tell it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    allowed = {b'{"execute":"%s"}' % command for command in COMMANDS}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(64)

        def serve() -> None:
            while True:
                try:
                    end, _ = server.accept()
                except OSError:
                    return
                with end, contextlib.suppress(OSError):
                    end.settimeout(2)
                    end.sendall(_GREETING)
                    for line in end.makefile("rb"):
                        if line.strip() not in allowed:
                            spoils.commands.append(line)
                        end.sendall(_REPLY)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join(3)


def attack_by_name(daemon: HostileDaemon) -> None:
    """Send every row with what once led elsewhere, in each of its texts."""
    for row in ROWS:
        texts = [one.name for one in row.arguments if isinstance(one, TextArgument)]
        good = {one: "c1" if one == "container" else "p1" for one in texts}
        good |= {"namespace": "k8s.io"} if "namespace" in texts else {}
        for base in (0, 1, 255):
            values: dict[str, Value] = {**good, "limit": 1 << 20, "root": base, "base": base}
            for number in (0, 1, 64, 0xFFFF_FFFF):
                daemon.ask(row.name, values | {"pid": number, "place": number, "above": number})
            for name in texts:
                for evil in EVIL:
                    daemon.ask(row.name, values | {name: evil})
            for evil in EVIL:
                daemon.ask(row.name, values | dict.fromkeys(texts, evil))


def attack_children(daemon: HostileDaemon, spoils: Spoils) -> None:
    """Ask children for what they are not for, and a monitor for more than two queries."""
    migrate = b'qmp"}\n{"execute":"migrate","arguments":{"uri":"exec:touch /tmp/x"}}'
    for kind in ("reader", "mover", "monitor"):
        with daemon.child(kind) as channel:
            for row in ROWS:
                for evil in ("p1", *EVIL):
                    values: dict[str, Value] = {
                        "sandbox": evil,
                        "monitor": "qmp",
                        "greeting_ms": 9,
                        "session_ms": 99,
                    }
                    daemon.send(NUMBERS[row.name], pack(row.name, values), channel)
            for monitor in (migrate, b"qmp\r\n", "../p1/qmp", "shim-monitor"):
                request: dict[str, Value] = {"sandbox": "p1", "monitor": monitor}
                data = pack("vcpu-list", request | {"greeting_ms": 900, "session_ms": 900})
                if daemon.send(NUMBERS["vcpu-list"], data, channel) is not None:
                    spoils.connected.append(f"monitor {monitor!r}")
    with daemon.child("monitor") as channel:
        good: dict[str, Value] = {"sandbox": "p1", "monitor": "qmp"}
        data = pack("vcpu-list", good | {"greeting_ms": 900, "session_ms": 900})
        assert daemon.send(NUMBERS["vcpu-list"], data, channel) is not None, "the two queries"


def attack_at_random(daemon: HostileDaemon, count: int, seed: int) -> None:
    """Send good requests with bytes changed, cut or added, and rows that are none."""
    chance = random.Random(seed)
    seeds = broker_requests()
    for _ in range(count):
        request = bytearray(chance.choice(seeds))
        row = request[0]
        if ROWS[row].name in {"child", "switches", "process-events"} and chance.random() > 0.01:
            row = chance.randrange(256)
        data = request[1:]
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data) + 1)] + chance.randbytes(chance.randrange(9))
        if chance.random() < 0.2:
            text = chance.choice(EVIL).encode()
            data += len(text).to_bytes(2, sys.byteorder) + text
        daemon.send(row, bytes(data))


class Trace:
    """What a broker and its children open, by strace(1), for the block."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._file = tempfile.NamedTemporaryFile(prefix="strace-", suffix=".log")  # noqa: SIM115

    def __enter__(self) -> Self:
        command = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", "trace=openat,open,openat2"]
        pid = self._broker.process.pid
        self._strace = subprocess.Popen(
            [*command, "-o", self._file.name, "-p", str(pid)], stderr=subprocess.DEVNULL
        )
        while not re.search(r"TracerPid:\t[1-9]", Path(f"/proc/{pid}/status").read_text()):
            if self._strace.poll() is not None:
                raise OSError("strace cannot look at the broker")
        return self

    def __exit__(self, *_: object) -> None:
        self._strace.terminate()
        self._strace.wait()

    def opened(self) -> set[str]:
        """Return the paths of all that was opened."""
        text = Path(self._file.name).read_text(errors="replace")
        return set(re.findall(r"\) += [0-9]+<(.*)>$", text, re.MULTILINE))


def outside_the_table(paths: set[str], settings: Settings) -> list[str]:
    """Return the paths of a trace that no row has, nor is above one, but for Python's and /proc."""
    own = (sys.base_prefix, str(Path(__file__).parents[2]), "/proc/", "/usr/lib", "/lib", "/dev/")
    shapes = [_shape(row.path, row.arguments) for row in ROWS]
    allowed: set[str] = {"/"}
    patterns = []
    for row, shape in zip(ROWS, shapes, strict=True):
        for base in settings.bases(row.base) if row.base else ():
            allowed |= {str(parent) for parent in Path(base).parents} | {base}
            patterns += [
                re.compile("/".join((re.escape(base), *shape[:depth])))
                for depth in range(1, len(shape) + 1)
            ]
    allowed.add(f"{settings.debugfs}/kvm")
    return sorted(
        path
        for path in paths
        if not path.startswith(own)
        and path not in allowed
        and not any(pattern.fullmatch(path) for pattern in patterns)
    )


def _shape(path: str, arguments: Sequence[object]) -> list[str]:
    """Return each part of a row's path as a regular expression."""
    patterns = {one.name: one.pattern for one in arguments if isinstance(one, TextArgument)}
    parts = path.replace("{checkpoint}", "cpu_manager_state").split("/") if path else []
    return [
        re.sub(
            r"\\{(\w+)\\}", lambda match: f"(?:{patterns.get(match[1], '[0-9]+')})", re.escape(p)
        )
        for p in parts
    ]


def measure(count: int, _only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield what a hostile daemon got of so many mutated requests, and by name."""
    with hunted() as (_, broker, spoils):
        daemon = HostileDaemon(broker, spoils)
        attack_by_name(daemon)
        attack_children(daemon, spoils)
        attack_at_random(daemon, count, seed=26)
        ended = broker.process.poll() is not None
    found = spoils.found + (["the broker ended"] if ended else [])
    detail = f"{spoils.granted} granted; {'; '.join(found[:3]) or 'nothing that the table lacks'}"
    yield count_row("hostile daemon", len(found), spoils.asked, detail, unit="finds")
