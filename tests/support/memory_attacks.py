"""Inputs made to exhaust memory, each given to its real parser in a process of its own.

    python -m tests.support.memory_attacks toml nri      # a line of figures per attack, in MiB
    for line in figures("toml"): ...

A process imports what the daemon imports and forks once per attack. The fork builds the input,
resets the kernel's record of its largest resident set (proc_pid_status(5), VmHWM; ru_maxrss of
getrusage(2) would inherit its parent's), and parses. What the parser answers does not matter here,
what it holds meanwhile and afterwards does. With more than LIMIT_MIB an attack ends in MemoryError.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kata_pin.base.errors import KataPinError
from kata_pin.service import assembly  # noqa: F401 - what the daemon has loaded
from kata_pin.service.app import calm_collector

CEILING_MIB: Final = 128.0
LIMIT_MIB: Final = 3072

Attack = Callable[[], Callable[[], object]]
"""Builds the input and returns what gives it to the parser."""

Parser = Callable[[bytes], object]

ATTACKS: Final[dict[str, Attack]] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Register an attack under its name."""

    def registered(made: Attack) -> Attack:
        ATTACKS[name] = made
        return made

    return registered


@dataclass(frozen=True)
class Figures:
    """What one attack cost: resident sets in MiB, CPU time, and what the parser answered."""

    name: str
    before: float
    peak: float
    after: float
    cpu_s: float
    answer: str


def figures(*groups: str) -> list[Figures]:
    """Run the attacks whose names begin so, in child processes."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.memory_attacks", *groups],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    return [Figures(**json.loads(line)) for line in child.stdout.splitlines()]


def _run(name: str) -> Figures:
    """Run one attack in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_MIB << 20, LIMIT_MIB << 20))
    before = _resident("VmRSS")
    act = ATTACKS[name]()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    started, answer = time.process_time(), "ok"
    try:
        act()
    except (KataPinError, MemoryError) as error:
        answer = f"{type(error).__name__}: {error}"[:160]
    spent = time.process_time() - started
    peak = _resident("VmHWM")
    return Figures(name, before, peak, _resident("VmRSS"), round(spent, 3), answer)


def _forked(name: str) -> None:
    """Run one attack in a fork, which prints its figures."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        print(json.dumps(asdict(_run(name))), flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"no {field}")


# ---- Kata's configuration ------------------------------------------------------------------------


def _toml(name: str, text: Callable[[int], str]) -> None:
    @attack(f"toml-{name}")
    def made() -> Callable[[], object]:
        from kata_pin.base.toml_text import MAX_CHARACTERS
        from kata_pin.peers.kata import parse_kata_config

        whole = text(MAX_CHARACTERS - 64)
        return lambda: parse_kata_config(whole)


_toml("dots", lambda size: "a" + ".a" * (size // 2) + " = 1\n")
_toml("spaced-dots", lambda size: "a" + " . a" * (size // 4) + " = 1\n")
_toml("quoted-dots", lambda size: "a" + '."."' * (size // 4) + " = 1\n")
_toml("header-dots", lambda size: "[a" + ".a" * (size // 2) + "]\n")
_toml("dotted-keys", lambda size: "".join(f"k{n}{'.a' * 200} = 1\n" for n in range(size // 412)))
_toml("dotted-tables", lambda size: "".join(f"[k{n}{'.a' * 15}]\n" for n in range(size // 40)))
_toml("inline-dots", lambda size: "a = [" + "{" + "a." * 2000 + "a=1}," * 40 + "]\n")
_toml("hidden-dots", lambda size: 'a = ["""x"""", {b' + ".b" * (size // 2) + " = 1}]\n")
_toml("empty-lists", lambda size: "a = [" + "[]," * (size // 3) + "]\n")
_toml("empty-tables", lambda size: "a = [" + "{}," * (size // 3) + "]\n")
_toml("array-tables", lambda size: "[[a]]\n" * (size // 6))
_toml("nested", lambda size: "a = " + "[" * (size // 2))
_toml("nested-tables", lambda size: "a = " + "{a=" * (size // 3))
_toml("keys", lambda size: "".join(f"k{n}=1\n" for n in range(size // 10)))
_toml("long-line", lambda size: 'a = "' + "\\u1234" * (size // 6) + '"\n')
_toml("open-string", lambda size: 'a = """' + '\\"""' * (size // 4))
_toml("quotes", lambda size: "a = " + '"' * size)
_toml("digits", lambda size: "a = " + "1" * size)


# ---- JSON of others ------------------------------------------------------------------------------


def _keys(size: int, values: int) -> bytes:
    return b"{" + b",".join(b'"k%07d":1' % n for n in range(min(size // 13, values - 9))) + b"}"


def _numbers(size: int, values: int) -> bytes:
    return b",".join(b"%011d" % (10**10 + n) for n in range(min(size // 13, values - 9)))


SHAPES: Final[dict[str, Callable[[int, int], bytes]]] = {
    "depth": lambda size, _: b"[" * size,
    "depth-of-objects": lambda size, values: b'{"a":' * (min(size // 6, values) - 1),
    "lists": lambda size, values: b"[" + b"[]," * (min(size // 3, values // 2) - 9) + b"1]",
    "objects": lambda size, values: b"[" + b'{"a":1},' * (min(size // 8, values // 2) - 9) + b"1]",
    "keys": _keys,
    "numbers": lambda size, values: b"[" + _numbers(size, values) + b"]",
    "digits": lambda size, _: b"1" * size,
    "wide-text": lambda size, _: b'"\xf0\x9f\x98\x80' + b"a" * (size - 9) + b'"',
    "escapes": lambda size, _: b'"' + b"\\ud83d" * (size // 6 - 9) + b'"',
    "quotes": lambda size, _: b'"' * size,
}
"""A value of at most so many bytes, and brackets and commas, by what it has many of."""


def _json(name: str, head: bytes, parse: Callable[[], tuple[Parser, int, int]]) -> None:
    for shape in SHAPES:

        @attack(f"{name}-{shape}")
        def made(shape: str = shape) -> Callable[[], object]:
            parser, size, values = parse()
            data = head + SHAPES[shape](size - len(head) - 1, values - 3) + b"}"
            return lambda: parser(data)


def _persist() -> tuple[Parser, int, int]:
    from kata_pin.base.json_text import MAX_BYTES, MAX_VALUES
    from kata_pin.peers.kata import parse_persist

    return parse_persist, MAX_BYTES, MAX_VALUES


def _checkpoint() -> tuple[Parser, int, int]:
    from kata_pin.base.json_text import MAX_VALUES
    from kata_pin.peers.kubelet.checkpoint import MAX_BYTES, parse_checkpoint

    return parse_checkpoint, MAX_BYTES, MAX_VALUES


def _pod_list() -> tuple[Parser, int, int]:
    from kata_pin.peers.kubelet.pods import MAX_BYTES, MAX_VALUES, parse_pods

    return parse_pods, MAX_BYTES, MAX_VALUES


def _state() -> tuple[Parser, int, int]:
    from kata_pin.base.json_text import MAX_BYTES, MAX_VALUES
    from kata_pin.peers.oci import parse_state

    return parse_state, MAX_BYTES, MAX_VALUES


def _request() -> tuple[Parser, int, int]:
    from kata_pin.service.commands import parse_request
    from kata_pin.service.exchange import MAX_REQUEST

    return parse_request, MAX_REQUEST, MAX_REQUEST


_json("persist", b'{"a":', _persist)
_json("state", b'{"a":', _state)
_json("checkpoint", b'{"a":', _checkpoint)
_json("pod-list", b'{"kind":"PodList","items":', _pod_list)
_json("request", b'{"a":', _request)


# ---- QEMU ----------------------------------------------------------------------------------------

READY: Final = b'{"return":{}}\r\n'
GREETING: Final = b'{"QMP":{"version":{},"capabilities":[]}}\r\n'


def hostile_qemu(path: str, lines: Callable[[], Iterator[bytes]]) -> None:
    """Serve a QMP socket in a thread: each client gets these lines as fast as it reads."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(8)

    def serve() -> None:
        while True:
            peer = listener.accept()[0]
            with peer, suppress(OSError):
                for line in lines():
                    peer.sendall(line)
                peer.recv(1 << 16)

    threading.Thread(target=serve, daemon=True).start()


def _qmp(name: str, lines: Callable[[int], Iterator[bytes]], sessions: int = 20) -> None:
    @attack(f"qmp-{name}")
    def made() -> Callable[[], object]:
        from kata_pin.base.errors import QmpUnavailable
        from kata_pin.follow import hooks
        from kata_pin.rights.broker.threads import MAX_REPLY

        path = os.path.join(tempfile.mkdtemp(), "qmp.sock")
        size = MAX_REPLY - 64
        prepared = list(lines(size))
        hostile_qemu(path, lambda: iter(prepared))

        async def talk() -> None:
            for _ in range(sessions):
                with suppress(QmpUnavailable):
                    await hooks.query(path, greeting_s=1.0, session_s=2.0)

        return lambda: asyncio.run(talk())


def _full(size: int, piece: bytes) -> bytes:
    return piece * (size // len(piece))


_qmp("greeting-lists", lambda size: iter([b'{"QMP":[' + _full(size, b"[],") + b"[]]}\r\n"]))
_qmp("greeting-objects", lambda size: iter([b'{"QMP":[' + _full(size, b'{"a":[]},') + b"1]}\r\n"]))
_qmp("greeting-depth", lambda size: iter([_full(size, b"[") + b"\r\n"]))
_qmp("greeting-endless", lambda size: iter([_full(size * 8, b" ")]))
_qmp("events", lambda size: iter([GREETING, READY, b'{"event":"A","data":[[],[]]}\r\n' * 80_000]))
_qmp(
    "reply",
    lambda size: iter(
        [GREETING, READY, b'{"id":"__qmp#00001","return":[' + _full(size, b"[],") + b"1]}\r\n"]
    ),
)
_qmp(
    "reply-bytes",
    lambda size: iter(
        [GREETING, READY, b'{"id":"__qmp#00001","return":["' + b"x" * (size - 99) + b'"]}\r\n']
    ),
)


# ---- NRI, ttrpc, the agent -----------------------------------------------------------------------


class _Pipe(asyncio.Transport):
    """A transport that drops what is written to it."""

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class _Sink:
    async def rebuild(self, snapshot: object, stamp_ns: int) -> None:
        self.kept = snapshot

    def receive(self, event: object, stamp_ns: int) -> int:
        return 0

    async def placed(self, event: object, ticket: int) -> None:
        pass


def synchronize(payload: Callable[[int], bytes], parts: int) -> str:
    """Send the parts of a Synchronize to a session; return the error that ended it, if any."""
    from kata_pin.peers import ttrpc
    from kata_pin.peers import ttrpc as peers_ttrpc
    from kata_pin.peers.nri import messages
    from kata_pin.peers.nri.session import NriSession

    async def talk() -> str:
        session = NriSession(_Sink(), None)
        session.connection_made(_Pipe())
        for part in range(parts):
            request = ttrpc.TtrpcRequest(messages.PLUGIN_SERVICE, "Synchronize", payload(part))
            frame = ttrpc.encode_request(2 * part + 1, request)
            for start in range(0, len(frame), 1 << 18):
                piece = frame[start : start + (1 << 18)]
                session.data_received(
                    peers_ttrpc.MUX_HEADER.pack(peers_ttrpc.PLUGIN, len(piece)) + piece
                )
            if session.closed.done():
                return str(session.closed.exception())
            await asyncio.sleep(0)
        return ""

    return asyncio.run(talk())


FRAME: Final = (4 << 20) - 256


def _field(number: int, body: bytes) -> bytes:
    """Return a length-delimited field of protobuf's wire format."""
    return bytes([number << 3 | 2]) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    made = b""
    while value > 127:
        made, value = made + bytes([value & 127 | 128]), value >> 7
    return made + bytes([value])


MORE: Final = b"\x18\x01"  # SynchronizeRequest.more


def _nri(name: str, payload: Callable[[int], bytes], parts: int = 256) -> None:
    @attack(f"nri-{name}")
    def made() -> Callable[[], object]:
        return lambda: synchronize(payload, parts)


def _long_pods(part: int) -> bytes:
    pods = [
        _field(1, _field(1, b"p%d-%d" % (part, n)) + _field(2, b"x" * 250)) for n in range(4000)
    ]
    return b"".join(pods) + MORE


def _annotated_pods(part: int) -> bytes:
    notes = b"".join(_field(6, _field(1, b"a%d" % n) + _field(2, b"x")) for n in range(60))
    pods = (_field(1, _field(1, b"p%d-%d" % (part, n)) + notes) for n in range(4000))
    return b"".join(pods) + MORE


def _many_annotations(part: int) -> bytes:
    notes = b"".join(_field(6, _field(1, b"%d" % n)) for n in range(380_000))
    return _field(1, _field(1, b"p%d" % part) + notes[: FRAME - 100]) + MORE


def _named_containers(part: int) -> bytes:
    one = _field(11, _field(5, b"/" + b"x" * 4000))
    made = (
        _field(2, _field(1, b"c%d-%d" % (part, n)) + _field(2, b"p") + one) for n in range(1000)
    )
    return b"".join(made) + MORE


_nri("long-names", _long_pods)
_nri("annotated-pods", _annotated_pods)
_nri("annotations", _many_annotations, parts=4)
_nri("long-paths", _named_containers)
_nri("empty-pods", lambda part: b"\x0a\x00" * (FRAME // 2) + MORE, parts=4)
_nri("empty-containers", lambda part: b"\x12\x00" * (FRAME // 2) + MORE, parts=4)
_nri("unknown-fields", lambda part: b"\xf8\x07\x01" * (FRAME // 3) + MORE, parts=16)
_nri("unknown-groups", lambda part: b"\xfb\x07\xfc\x07" * (FRAME // 4) + MORE, parts=16)
_nri("nested-groups", lambda part: b"\xfb\x07" * (FRAME // 2), parts=16)
_nri("empty-parts", lambda part: MORE, parts=100_000)


async def _hostile_runtime(path: Path, payload: bytes) -> None:
    """Serve NRI: each plugin gets a Synchronize that does not end, as fast as it reads."""
    from tests.support.nriruntime import Runtime

    async with Runtime(path) as runtime:
        while True:
            peer = await runtime.plugin()
            with suppress(OSError):
                await peer.registered()
                while True:
                    peer.begin("Synchronize", payload)
                    await peer.writer.drain()


@attack("nri-sessions")
def _nri_sessions() -> Callable[[], object]:
    from kata_pin.peers.nri.plugin import NriPlugin

    path = Path(tempfile.mkdtemp(), "nri.sock")
    runtime = os.fork()
    if not runtime:
        asyncio.run(_hostile_runtime(path, _long_pods(0)))

    async def connect(sessions: int = 30) -> None:
        plugin = NriPlugin(
            _Sink(), socket_path=str(path), name="kata-pin", index="95", wanted=False
        )
        running = asyncio.create_task(plugin.run())
        for _ in range(sessions):
            plugin._tries, plugin.problem = 0, ""
            while not plugin.problem:
                await asyncio.sleep(0.01)
        running.cancel()

    def act() -> None:
        try:
            asyncio.run(connect())
        finally:
            os.kill(runtime, signal.SIGKILL)

    return act


@attack("ttrpc-frames")
def _ttrpc_frames() -> Callable[[], object]:
    from kata_pin.peers.ttrpc import HEADER, FrameDecoder

    empty = HEADER.pack(0, 1, 2, 0) * 26_000
    open_end = HEADER.pack(4 << 20, 1, 2, 0)

    def act() -> None:
        decoder = FrameDecoder()
        for _ in range(100):
            for _frame in decoder.feed(empty):
                pass
        decoder.feed(open_end)
        for _ in range(64):
            for _frame in decoder.feed(b"x" * (1 << 20)):
                pass

    return act


@attack("agent-usage")
def _agent_usage() -> Callable[[], object]:
    from kata_pin.peers.agent import client, messages

    packed = _field(2, b"\x01" * (client.MAX_METRICS - 64))
    data = _field(1, _field(1, _field(1, packed)))
    return lambda: messages.parse_usage(data)


@attack("agent-metrics")
def _agent_metrics() -> Callable[[], object]:
    from kata_pin.peers.agent.messages import MAX_METRICS, parse_cpu_times

    line = 'kata_guest_cpu_time{{cpu="{}",item="user"}} 1\n'
    text = "".join(line.format(n % 10_000) for n in range(MAX_METRICS // 48))
    return lambda: parse_cpu_times(text)


@attack("agent-cpuinfo")
def _agent_cpuinfo() -> Callable[[], object]:
    from kata_pin.peers.agent.messages import MAX_CPUINFO, parse_cpuinfo

    data = b"\n" * MAX_CPUINFO
    return lambda: parse_cpuinfo(data)


# ---- lines of /proc, cpu lists, our own files ----------------------------------------------------


@attack("cpu-list")
def _cpu_list() -> Callable[[], object]:
    from kata_pin.base.cpuset import CpuSet

    text = ",".join(["0-8191"] * 4500)
    return lambda: CpuSet.parse(text)


@attack("cgroup-lines")
def _cgroup_lines() -> Callable[[], object]:
    from kata_pin.linux.proc import MAX_CGROUP, parse_cgroup

    data = b"0::/\n" * (MAX_CGROUP // 5)
    return lambda: parse_cgroup(data)


@attack("cgroup-controllers")
def _cgroup_controllers() -> Callable[[], object]:
    from kata_pin.linux.proc import MAX_CGROUP, parse_cgroup

    data = b"0:" + b"," * (MAX_CGROUP - 10) + b":/\n"
    return lambda: parse_cgroup(data)


@attack("command-line")
def _command_line() -> Callable[[], object]:
    from kata_pin.linux.proc import MAX_CMDLINE, parse_cmdline

    data = b"\0" * MAX_CMDLINE
    return lambda: parse_cmdline(data)


@attack("unix-sockets")
def _unix_sockets() -> Callable[[], object]:
    from kata_pin.follow import hooks

    folder = tempfile.mkdtemp()
    Path(folder, "net").mkdir()
    line = "0000000000000000: 00000002 00000000 00010000 0001 01 1\n"
    Path(folder, "net/unix").write_text(line * (hooks.MAX_SOCKETS // len(line) + 1000))
    return lambda: hooks.is_held("/x", proc=folder)


@attack("yaml-list")
def _yaml_list() -> Callable[[], object]:
    from kata_pin.service.configuration import from_text

    text = "version: 1\nhypervisors: [" + "a," * 31_000 + "]"
    return lambda: from_text(text)


@attack("yaml-depth")
def _yaml_depth() -> Callable[[], object]:
    from kata_pin.service.configuration import from_text

    return lambda: from_text("[" * 64_000)


@attack("yaml-aliases")
def _yaml_aliases() -> Callable[[], object]:
    from kata_pin.service.configuration import from_text

    lines = [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    return lambda: from_text("version: 1\na0: &a0 x\n" + "\n".join(lines))


@attack("yaml-keys")
def _yaml_keys() -> Callable[[], object]:
    from kata_pin.service.configuration import from_text

    text = "version: 1\n" + "".join(f"k{n}: 1\n" for n in range(7000))
    return lambda: from_text(text)


@attack("overrides")
def _overrides() -> Callable[[], object]:
    from kata_pin.options.allocation.orders import MAX_BYTES, parse_orders

    data = b"#\n" * (MAX_BYTES // 2)
    return lambda: parse_orders(data)


def main(*groups: str) -> None:
    """Run the attacks whose names begin so; all without any."""
    calm_collector()
    for name in ATTACKS:
        if name.startswith(groups or ("",)):
            _forked(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
