"""The broker through its socket: the wire, arguments that are refused, rows that are off, its end.

What each row does is in test_broker_files.py and test_broker_threads.py.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from tests.boundary.broker import (
    LONGEST,
    OFF,
    PROGRAM,
    Channel,
    Thread,
    broker,
    changes,
    is_binary,
    packed,
    rows,
    started,
)
from tests.support.specimen import specimen
from tests.support.waiting import wait_for

NOBODYS_UID: Final = 65_534
NOBODY: Final = changes([])
WINDOW: Final = struct.Struct("=IQQQIIHB")

GOOD: Final[dict[str, int | str | bytes]] = {
    **dict.fromkeys(("limit", "root", "base", "place", "above", "pattern", "cpu", "mask"), 0),
    **dict.fromkeys(("token", "execs", "greeting_ms", "session_ms", "policy", "priority"), 0),
    **dict.fromkeys(("sandbox", "container", "namespace", "program", "class", "group"), "p1"),
    **dict.fromkeys(("writes", "pids", "tids", "window"), b""),
    "pid": 2**22 + 1,
    "spec": "s",
    "driver": "overlay",
    "monitor": "qmp",
    "file": "exe",
    "kind": "other",
    "banned": "?",
    "changes": NOBODY,
}
"""An argument of each name that has the form of one."""

MOST: Final = {
    "limit": 4 << 20,
    "root": 255,
    "base": 1,
    "place": 3,
    "above": 64,
    "pattern": 0xFFFF,
    "cpu": 8191,
    "token": 2**31 - 1,
    "execs": 1,
    "greeting_ms": 1000,
    "session_ms": 5000,
    "policy": 6,
    "priority": 99,
    "pid": 2**31 - 1,
    "mask": 2**32 - 1,
}
"""The largest number of each name."""

PATHS: Final = ("/", "..", "../x", "a/b", "a\0b", "a\n", ".", "x" * 300, "-", " ", "\xe9")
"""Texts that would lead elsewhere, or are too long."""

ON: Final[dict[str, Any]] = {
    **dict.fromkeys(("qmp", "thread_events", "resctrl", "memory"), True),
    "quiet": "full",
    "rt": ["CPU [0-9]/KVM"],
}
"""All that can be switched on."""


def arguments(name: str, **others: int | str | bytes) -> list[int | str | bytes]:
    """Return good arguments of a row but for these."""
    return [others.get(argument, GOOD[argument]) for argument in rows()[name].arguments]


# ---- arguments ---------------------------------------------------------------------------


def forms(name: str) -> Iterator[bytes]:
    """Yield requests for a row, each with one argument of another form, or cut, or too long."""
    names = rows()[name].arguments
    for argument in names:
        wrong: tuple[int | str, ...] = () if is_binary(argument) else PATHS
        if argument in MOST:
            most = MOST[argument]
            wrong = tuple(number for number in (most + 1, 2**32 - 1) if most < number < 2**32)
        yield from (packed(*arguments(name, **{argument: value})) for value in wrong)
    if not (names and is_binary(names[-1])):
        data = packed(*arguments(name))
        yield data + b"x"
        yield from (data[:size] for size in range(len(data)))


def test_no_argument_of_another_form_is_taken() -> None:
    """No number too large, no text that could be a path, nothing short or long: of every row."""
    with broker(**ON) as ask:
        taken = [
            (name, data)
            for name, row in rows().items()
            for data in forms(name)
            if ask.request(row.number, data).errno != errno.EINVAL
        ]
        assert taken == []
        for number in range(len(rows()), 256):
            assert ask.request(number, b"").errno == errno.EINVAL, "the page has all rows"


@pytest.mark.parametrize("name", ["affinities", "classes", "join-group"])
def test_changes_without_sense(name: str) -> None:
    """Threads, sets and lengths that do not fit; thread 0 is the caller itself for the kernel."""
    mask = struct.pack("=HB", 1, 1)
    whole = changes([Thread(1, 1, 0)] * 3, {0})
    wrong = [
        *(b"", b"\0", whole + b"\0", whole[:-1], whole[:9]),
        struct.pack("=HH", 0, 1),
        struct.pack("=HH", 1, 0),
        struct.pack("=HHH", 1, 0, 1025) + bytes(1025),
        struct.pack("=HHH", 1, 0, 9),
        *(changes([Thread(tgid, tid, 0)], {0}) for tgid, tid in ((0, 1), (1, 0), (-1, 1), (1, -1))),
        struct.pack("=HH", 0, 1) + struct.pack("=iiQQH", 1, 1, 0, 0, 0),
        struct.pack("=HH", 1, 1) + mask + struct.pack("=iiQQH", 1, 1, 0, 0, 1),
        struct.pack("=HH", 1, 513) + mask + struct.pack("=iiQQH", 1, 1, 0, 0, 0) * 513,
    ]
    with broker(**ON) as ask:
        values = arguments(name)
        for data in wrong:
            assert ask.refusals(name, *values[:-1], data) == errno.EINVAL, data[:40]
        most = struct.pack("=HH", 1, 512) + mask + struct.pack("=iiQQH", 1, 1, 0, 0, 0) * 512
        assert ask(name, *values[:-1], most).errno == 0


WRITES: Final = (
    *(b"", b"interrupt 24", b"interrupt ../24 0-3", b"interrupt 24/../../x 0", b"interrupt  0-3"),
    *(b"interrupt 24 0-3 ", b"interrupt 24 all", b"interrupt 24 ", b"interrupt 24 0,,1"),
    *(b"interrupt -1 0", b"default-mask 1 f", b"default-mask  0x3", b"default-mask  f,"),
    *(b"sysctl kernel.core_pattern x", b"interrupt 24 0\n\n", b"interrupt \xd9\xa1 0"),
    *(b"rps ../../x/rx-0 f", b"rps ../rx-0 f", b"rps ./rx-0 f", b"rps eth0/../rx-0 f"),
    *(b"rps eth0/rx-0/../x f", b"rps eth0/tx-0 f", b"rps eth0 f", b"xps eth0/rx-0 f"),
    *(b"workqueues x f", b"workqueues  0-3", b"watchdog  ", b"idle-limit 4 -1"),
    *(b"idle-limit 4/../5 0", b"governor 4 ../x", b"governor x performance"),
    *(b"kernel-thread 33 0-3", b"kernel-thread 0:1 0-3", b"kernel-thread 33:1 "),
    b"\n".join([b"interrupt 24 0"] * 257),
)


def test_writes_without_sense() -> None:
    """No path, no other kind, no other form of a value, no more than 256."""
    with broker(quiet="full") as ask:
        for data in WRITES:
            assert ask.refusals("tunables", data) == errno.EINVAL, data[:40]
        assert len(ask("tunables", b"\n".join([b"interrupt 999999999 0"] * 256)).written) == 256


def test_windows_without_sense() -> None:
    """Bounds, alignment, and a node that is none of those wanted are refused unseen."""
    near = b"\3"
    good = (7, 9, 1 << 30, 4096, 20, 10, 1, 1)
    wrong = [
        *((0, *good[1:]), (1 << 31, *good[1:])),
        *((*good[:4], pages, most, *good[6:]) for pages, most in ((0, 0), (20, 0), (20, 21))),
        (*good[:4], 65_537, 10, *good[6:]),
        *((*good[:3], size, *good[4:]) for size in (2048, 12_288, 1 << 35)),
        *((*good[:2], address, *good[3:]) for address in ((1 << 30) + 8, (1 << 56) - 4096)),
        (*good[:6], 2, 1),
    ]
    with broker(memory=True) as ask, ask.child("mover") as mover:
        for values in wrong:
            data = WINDOW.pack(*values) + near
            assert mover.refusals("move-pages", data) == errno.EINVAL, values
        for data in (b"", WINDOW.pack(*good), WINDOW.pack(*good) + near + bytes(128)):
            assert mover.refusals("move-pages", data) == errno.EINVAL
        assert mover.refusals("move-pages", WINDOW.pack(*good) + near) in {
            *(errno.EACCES, errno.ESRCH),
        }, "a good one is looked at"


# ---- rows that are off -------------------------------------------------------------------

OF_FEATURES: Final = {
    "nri": ["nri"],
    "cri": ["cri"],
    "pods": ["pods"],
    "process-events": ["thread_events"],
    "irqbalance": ["quiet"],
    "make-group": ["resctrl"],
    "join-group": ["resctrl"],
    "tunables": ["quiet"],
}
"""The rows of the broker that depend on a setting."""


@pytest.mark.parametrize("name", OF_FEATURES)
def test_what_is_switched_off_is_not_served(name: str, tmp_path: Path) -> None:
    """Whatever else is on."""
    (feature,) = OF_FEATURES[name]
    sockets: dict[str, Any] = dict.fromkeys(("nri", "cri", "pods"), str(tmp_path / "absent.sock"))
    values = arguments(name, writes=b"interrupt 999999999 0")
    with broker(**{**ON, **sockets, feature: OFF[feature]}) as ask:
        assert ask.refusals(name, *values) == errno.EACCES
    with broker(**{**ON, **sockets}) as ask:
        reply = ask(name, *values)
        assert reply.errno != errno.EACCES or name == "make-group", "no class of the settings"
        for fd in reply.descriptors:
            os.close(fd)


def test_only_a_real_time_class_needs_its_setting() -> None:
    """An ordinary one can always be given back."""
    with broker() as ask:
        assert ask.refusals("classes", os.SCHED_OTHER, 0, NOBODY) == 0
        for policy in (os.SCHED_FIFO, os.SCHED_RR):
            assert ask.refusals("classes", policy, 1, NOBODY) == errno.EACCES
    with broker(rt=["CPU [0-9]/KVM"]) as ask:
        for policy in (os.SCHED_FIFO, os.SCHED_RR):
            assert ask.refusals("classes", policy, 1, NOBODY) == 0
            assert ask.refusals("classes", policy, 49, NOBODY) == 0
            for priority in (0, 50, 99):
                assert ask.refusals("classes", policy, priority, NOBODY) == errno.EINVAL
        for policy, priority in ((os.SCHED_OTHER, 1), (4, 0), (6, 0)):
            assert ask.refusals("classes", policy, priority, NOBODY) == errno.EINVAL


@pytest.mark.parametrize("kind", ["reader", "mover", "monitor"])
def test_rows_of_children(kind: str) -> None:
    """The broker makes no call that may never end; each child makes its own, while it is on."""
    own = {"reader": {"slow-file", "system-calls"}, "mover": {"move-pages"},
           "monitor": {"vcpu-list"}}[kind]  # fmt: skip
    served: dict[bool, set[str]] = {}
    for on in (True, False):
        with broker(**{**ON, "memory": on, "qmp": on}) as ask, ask.child(kind) as child:
            for name in ("slow-file", "system-calls", "move-pages", "vcpu-list"):
                assert ask.refusals(name, *arguments(name)) in {errno.EINVAL, errno.EACCES}, name
            served[on] = {
                name for name in rows() if child.refusals(name, *arguments(name)) != errno.EACCES
            }
    assert served[True] == own
    assert served[False] == own - {"move-pages", "vcpu-list"}


# ---- the wire ----------------------------------------------------------------------------


def test_a_message_without_a_head_and_the_longest() -> None:
    """The first is answered as request 0; the longest is taken whole; none ends the channel."""
    with broker() as ask:
        for data in (b"a", b"abcd"):
            number, reply = ask.message(data)
            assert (number, reply.errno, reply.data) == (0, errno.EINVAL, b"")
        head = struct.pack("=BI", rows()["affinities"].number, 7)
        number, reply = ask.message(head + bytes(LONGEST - len(head)))
        assert (number, reply.errno) == (7, errno.EINVAL)
        assert ask("executable", os.getpid()).errno == 0


def test_a_long_answer_is_a_file_in_memory(tmp_path: Path) -> None:
    """Names of a folder, 16,384 at most; what does not fit a message comes as a descriptor."""
    for number in range(2000):
        (tmp_path / f"{number:0>60}").touch()
    with broker(cdi=str(tmp_path)) as ask:
        assert sorted(ask("cpu-claims").value) == [f"{number:0>60}" for number in range(2000)]
    many = tmp_path / "many"
    many.mkdir()
    for number in range(16_500):
        os.mknod(many / str(number))
    with broker(cdi=str(many)) as ask:
        assert len(ask("cpu-claims").value) == 16_384


def test_noise_gets_an_answer_each_and_holds_nothing() -> None:
    """Messages at random, with descriptors: one answer per message, and none is kept open."""
    dice = random.Random(7)
    numbers = [row.number for name, row in rows().items() if name != "child"]
    with broker(**ON) as ask, open(os.devnull, "rb") as null:
        before = len(os.listdir(f"/proc/{ask.pid}/fd"))
        for turn in range(3000):
            data = dice.randbytes(dice.choice((0, 1, 3, 4, 8, 40, 400)))
            reply = ask.request(dice.choice((*numbers, 255)), data, [null.fileno()] * (turn % 4))
            for fd in reply.descriptors:
                os.close(fd)
        assert len(os.listdir(f"/proc/{ask.pid}/fd")) == before
        assert ask("executable", os.getpid()).errno == 0


# ---- its rights, its children, its end -----------------------------------------------------


@pytest.mark.root
def test_rights() -> None:
    """It keeps five capabilities of those that it had, each child two at most; none gains more."""
    kept = {"": (2, 12, 19, 23, 38), "reader": (2, 19), "mover": (19, 23), "monitor": (1, 2)}
    with broker(qmp=True, memory=True) as ask:
        for kind, capabilities in kept.items():
            with ask.child(kind) if kind else nullcontext(ask) as process:
                process("executable", os.getpid())  # a child has its rights before it answers
                text = Path(f"/proc/{process.pid}/status").read_text()
            status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            allowed = sum(1 << number for number in capabilities)
            assert int(status["CapEff"], 16) & ~allowed == 0, kind
            assert int(status["CapPrm"], 16) == int(status["CapEff"], 16)
            assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
            assert status["NoNewPrivs"] == "1"


def test_children_are_bounded_and_can_be_ended() -> None:
    """64 at once; what is not the broker's child is not ended."""
    with broker() as ask, specimen() as bystander:
        held = len(os.listdir(f"/proc/{ask.pid}/fd"))
        replies = [ask("child", "reader") for _ in range(65)]
        assert [reply.errno for reply in replies] == [0] * 64 + [errno.EMFILE]
        assert ask("executable", os.getpid()).errno == 0
        assert ask.refusals("end-child", bystander.pid) == 0
        assert ask.refusals("end-child", ask.pid) == 0
        assert bystander.child.poll() is None
        for reply in replies[:64]:
            (pid,) = struct.unpack("=I", reply.data)
            assert ask.refusals("end-child", pid) == 0
            (fd,) = reply.descriptors
            with socket.socket(fileno=fd) as end:
                assert end.recv(10) == b"", "its end is closed"
        wait_for(lambda: not ask.children(), "their end")
        with ask.child("reader") as reader:
            assert reader("slow-file", 9, os.getpid(), "cmdline").errno == 0
            assert len(os.listdir(f"/proc/{ask.pid}/fd")) == held + 1, "of those it keeps nothing"


def test_a_child_that_cannot_be_watched_leaves_nothing() -> None:
    """Its socket is closed: it ends, and the broker has no descriptor more than before.

    Two descriptors are left, which the socket takes. A child that ends at once cannot be watched
    either.
    """
    with broker() as ask:
        folder = f"/proc/{ask.pid}/fd"
        before = {int(name) for name in os.listdir(folder)}
        room = [fd for fd in range(max(before) + 4) if fd not in before]
        limits = resource.prlimit(ask.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(ask.pid, resource.RLIMIT_NOFILE, (room[2], limits[1]))
        assert ask("child", "reader").errno == errno.EMFILE
        resource.prlimit(ask.pid, resource.RLIMIT_NOFILE, limits)
        wait_for(lambda: not ask.children(), "the child to end")
        assert {int(name) for name in os.listdir(folder)} == before
        with ask.child("reader") as reader:
            assert reader("slow-file", 9, os.getpid(), "cmdline").errno == 0


def test_a_child_that_hangs_costs_nobody_else() -> None:
    """The broker goes on meanwhile, and kills it when it is asked to."""
    with broker() as ask, ask.child("reader") as reader:
        assert reader("slow-file", 9, os.getpid(), "cmdline").errno == 0
        os.kill(reader.pid, signal.SIGSTOP)
        assert ask("executable", os.getpid()).errno == 0
        with ask.child("reader") as other:
            assert other("slow-file", 9, os.getpid(), "cmdline").errno == 0
        ask("end-child", reader.pid)
        assert reader.end.recv(10) == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_signal_of_a_service_ends_it(number: signal.Signals) -> None:
    """It ends when its daemon does, and its children with it; systemd signals the whole group."""
    with broker() as ask:
        os.kill(ask.pid, number)
        assert ask("executable", os.getpid()).errno == 0


def test_it_ends_with_a_daemon_that_is_killed() -> None:
    """Whoever holds the other end: SIGKILL closes it, and the broker and its children are gone."""
    first = json.dumps(OFF).encode()
    with started(first) as (ours, process):
        assert ours.recv(9) == struct.pack("=Ii", 0, 0)
        reply = Channel(ours, process.pid)("child", "reader")
        (pid,) = struct.unpack("=I", reply.data)
        daemon = subprocess.Popen(["sleep", "60"], pass_fds=[ours.fileno(), *reply.descriptors])
        with daemon:
            ours.close()
            for fd in reply.descriptors:
                os.close(fd)
            assert process.poll() is None, "the daemon lives"
            daemon.kill()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "its child to end")


@pytest.mark.parametrize("first", [b"", json.dumps(OFF).encode()], ids=["nothing", "settings"])
def test_a_daemon_that_is_killed_while_it_starts(first: bytes) -> None:
    """A broker that nobody waits for any more ends, and complains of nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if first:
            ours.send(first)
        ours.close()
        command = ["python3", "-IS", str(PROGRAM), str(theirs.fileno())]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, timeout=20, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("first", [b"x/usr/bin/qemu", b"[]", b'{"folder": "/"}', b"{"])
def test_a_first_message_of_no_sense(first: bytes) -> None:
    """It serves nothing."""
    with started(first) as (ours, process):
        assert ours.recv(100) == b""
        assert process.wait(20) == 1


@pytest.mark.root
def test_nobody_of_its_user_looks_into_it() -> None:
    """The daemon's user is the broker's: its memory and descriptors are root's to see."""
    try:
        subprocess.run([sys.executable, "-IS", "-c", ""], user=NOBODYS_UID, check=True)
    except PermissionError:
        pytest.skip(f"no other user may run {sys.executable}")
    with started(json.dumps(OFF).encode(), user=NOBODYS_UID) as (ours, process):
        assert ours.recv(9) == struct.pack("=Ii", 0, 0)
        for file in ("environ", "mem", "fd"):
            look = ["test", "-r", f"/proc/{process.pid}/{file}"]
            assert subprocess.run(look, user=NOBODYS_UID, check=False).returncode == 1, file
