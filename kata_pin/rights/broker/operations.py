"""The program of the broker, and what it does: a method per row of the table that acts (D23)."""

from __future__ import annotations

import os
import signal
import socket
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EACCES, EINVAL, EMFILE, ENODEV
from fnmatch import fnmatchcase
from functools import partial
from select import poll
from typing import Any, Final

from kata_pin.rights.broker import threads
from kata_pin.rights.broker.children import CHILDREN
from kata_pin.rights.broker.files import (
    connected,
    listener,
    names_in,
    open_path,
    read_file,
    status_of_fd,
)
from kata_pin.rights.broker.libc import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_NET_ADMIN,
    CAP_PERFMON,
    CAP_SETUID,
    CAP_SYS_NICE,
    CAP_SYS_PTRACE,
    libc,
    open_switches,
    process_events,
    status_of,
)
from kata_pin.rights.broker.living import executable_of, executables
from kata_pin.rights.broker.policy import VmmPolicy, field
from kata_pin.rights.broker.protocol import (
    ANSWER,
    MAX_MESSAGE,
    MAX_NAMES,
    NUMBER,
    STATUS,
    AffinityChange,
    Answer,
    Changed,
    answer_of,
    parse_changes,
    parse_settings,
    render_changed,
    serve,
)
from kata_pin.rights.broker.rows import (
    AGENT_ROW,
    CHILD_ROW,
    FILE_ROW,
    FOLDERS_ROW,
    MONITOR_ROW,
    NAMES_ROW,
    ROWS,
    SERVER_ROW,
    WATCH_ROW,
    Row,
    above,
    folders,
    programs,
)
from kata_pin.rights.broker.threads import ORDINARY, change_threads, set_classes
from kata_pin.rights.broker.tunables import (
    ResctrlGroups,
    ask_irqbalance,
    check_level,
    parse_writes,
    write_tunables,
)

MAX_READERS: Final = 64
"""Most children at once; of those that were killed, some may be stuck in the kernel for good."""

_MASK: Final = 0x0000_0FCA | 0x2300_0000
"""Events of written, new and lost files (linux/inotify.h), and how to watch: nothing of readers."""

_IN_DONT_FOLLOW: Final = 0x0200_0000

Values = dict[str, Any]


class Operations:
    """What the daemon may ask for, by the number of the row."""

    def __init__(self, policy: VmmPolicy) -> None:
        self._policy = policy
        self._settings = policy.settings
        self._resctrl = ResctrlGroups(dict(self._settings.classes))
        self._folders = list(folders(self._settings))
        self._bases = {row.base: self._settings.bases(row.base) for row in ROWS if row.base}
        """Resolved once: that of four bundle roots takes longer than reading a bundle."""
        self._children: dict[int, int] = {}
        """The pidfds of children, by pid."""
        self._by_kind = {
            FILE_ROW: self._file,
            FOLDERS_ROW: self._names,
            NAMES_ROW: self._names,
            WATCH_ROW: self._watch,
            AGENT_ROW: self._agent,
            SERVER_ROW: self._server,
        }

    def run(self, number: int, data: bytes, descriptors: Sequence[int]) -> Answer:
        """Run an operation; raises OSError, and ValueError for a request without sense."""
        row = ROWS[number]
        values: Values = row.parse(data)
        if not self._settings.serves(row.feature):
            raise OSError(EACCES, f"{row.feature} is switched off")
        if row.does in {CHILD_ROW, MONITOR_ROW}:
            raise ValueError("a child's row")
        if row.does in self._by_kind:
            return self._by_kind[row.does](row, values, descriptors)
        call: Callable[[Values, Sequence[int]], Answer]
        call = getattr(self, f"_{row.name.replace('-', '_')}")
        return call(values, descriptors)

    def end(self) -> None:
        """Kill the children."""
        for pid in list(self._children):
            self._end_child({"pid": pid}, ())

    # ---- files, folders and sockets --------------------------------------------------------

    def _base(self, row: Row, values: Values) -> str:
        """Return the folder, or the file, that a row hangs off; OSError for no such root."""
        bases = self._bases[row.base]
        if values.get("root", 0) >= len(bases):
            raise OSError(ENODEV, "no such root")
        return bases[values.get("root", 0)]

    def _open(self, row: Row, values: Values) -> int:
        parts = row.parts({**values, "checkpoint": self._settings.checkpoint})
        return open_path(self._base(row, values), parts)

    def _file(self, row: Row, values: Values, _: Sequence[int]) -> Answer:
        parts = row.parts({**values, "checkpoint": self._settings.checkpoint})
        found = read_file(self._base(row, values), parts, values["limit"], self._policy.owners)
        return Answer(STATUS.pack(*found.status) + found.content)

    def _names(self, row: Row, values: Values, _: Sequence[int]) -> Answer:
        fd = self._open(row, values)
        try:
            names = names_in(f"/proc/self/fd/{fd}", MAX_NAMES, folders=row.does == FOLDERS_ROW)
            return answer_of(names)
        finally:
            os.close(fd)

    def _folder_status(self, values: Values, _: Sequence[int]) -> Answer:
        folder = self._place(values)
        return Answer(STATUS.pack(*status_of(folder)))

    def _place(self, values: Values) -> str:
        return above(self._folders[values["place"]], values["above"])

    def _watch(self, row: Row, values: Values, descriptors: Sequence[int]) -> Answer:
        return _watched(self._open(row, values), values["mask"], descriptors)

    def _watch_folder(self, values: Values, descriptors: Sequence[int]) -> Answer:
        folder = self._place(values)
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return _watched(fd, values["mask"], descriptors)

    def _agent(self, row: Row, values: Values, _: Sequence[int]) -> Answer:
        """Connect to a VMM's own socket: what listens there must be a VMM."""
        end = connected(self._open(row, values))
        try:
            self._policy.require(listener(end))
            return Answer(b"", (end.detach(),))
        finally:
            end.close()

    def _server(self, row: Row, values: Values, _: Sequence[int]) -> Answer:
        fd = self._open(row, values)
        if status_of_fd(fd).uid not in self._policy.owners:
            os.close(fd)
            raise OSError(EACCES, "the socket is not root's")
        return Answer(b"", (connected(fd).detach(),))

    def _process_events(self, values: Values, _: Sequence[int]) -> Answer:
        return Answer(b"", (process_events(values["token"], execs=bool(values["execs"])).detach(),))

    def _irqbalance(self, values: Values, _: Sequence[int]) -> Answer:
        asked, banned = values["banned"][:1], values["banned"][1:]
        end = ask_irqbalance(values["pid"], banned if asked == "=" else None)
        return Answer(b"", (end.detach(),))

    # ---- processes and threads -------------------------------------------------------------

    def _affinities(self, values: Values, _: Sequence[int]) -> Answer:
        return self._changed(values, change_threads, ours=True)

    def _classes(self, values: Values, _: Sequence[int]) -> Answer:
        policy, priority = values["policy"], values["priority"]
        if policy not in ORDINARY and not self._settings.serves("rt"):
            raise OSError(EACCES, "rt is switched off")
        given = partial(set_classes, policy=policy, priority=priority, vcpus=self._settings.rt)
        return self._changed(values, given)

    def _changed(
        self,
        values: Values,
        change: Callable[[Sequence[AffinityChange]], list[Changed]],
        *,
        ours: bool = False,
    ) -> Answer:
        """Change those threads that may be touched, our own too with `ours`."""
        changes = parse_changes(values["changes"])
        refused = {
            tgid: 0 if ours and _is_ours(tgid) else self._policy.refusal(tgid)
            for tgid in {one.tgid for one in changes}
        }
        done = iter(change([one for one in changes if not refused[one.tgid]]))
        return Answer(
            render_changed(
                Changed(refused[one.tgid]) if refused[one.tgid] else next(done) for one in changes
            )
        )

    def _executable(self, values: Values, _: Sequence[int]) -> Answer:
        link, target = executable_of(values["pid"])
        return Answer(STATUS.pack(*status_of(link)) + os.fsencode(target))

    def _executables(self, values: Values, _: Sequence[int]) -> Answer:
        pids = array("I", values["pids"])
        if len(pids) > threads.MAX_PIDS:
            raise ValueError("too many processes")
        return answer_of(executables(pids))

    def _program(self, values: Values, _: Sequence[int]) -> Answer:
        known = programs(self._settings)
        if values["pattern"] >= len(known):
            raise OSError(ENODEV, "no such program")
        folder, pattern = known[values["pattern"]]
        name = values["program"]
        if name and not fnmatchcase(name, pattern):
            raise OSError(EACCES, "no program of the settings")
        return Answer(STATUS.pack(*status_of(f"{folder}/{name}")))

    def _verify_jail(self, values: Values, _: Sequence[int]) -> Answer:
        base = (self._settings.vc, self._settings.kata)[values["base"]]
        self._policy.verify_jail(values["pid"], base, values["program"], values["sandbox"])
        return Answer()

    def _kvm_vcpus(self, values: Values, _: Sequence[int]) -> Answer:
        pid = values["pid"]
        self._policy.require(pid)
        tids = {int(tid) for tid in os.listdir(f"/proc/{pid}/task")}
        folder = f"{self._settings.debugfs}/kvm"
        return answer_of([*threads.kvm_vcpus(folder, tids)])

    def _descriptors(self, values: Values, _: Sequence[int]) -> Answer:
        self._policy.require(values["pid"])
        return answer_of(threads.descriptors(f"/proc/{values['pid']}"))

    def _switches(self, values: Values, _: Sequence[int]) -> Answer:
        return Answer(b"", (open_switches(values["cpu"]),))

    # ---- values of the kernel --------------------------------------------------------------

    def _make_group(self, values: Values, _: Sequence[int]) -> Answer:
        self._resctrl.make(values["class"], values["group"])
        return Answer()

    def _join_group(self, values: Values, _: Sequence[int]) -> Answer:
        return self._changed(values, partial(self._resctrl.join, values["class"], values["group"]))

    def _remove_group(self, values: Values, _: Sequence[int]) -> Answer:
        self._resctrl.remove(values["class"], values["group"])
        return Answer()

    def _tunables(self, values: Values, _: Sequence[int]) -> Answer:
        writes = parse_writes(values["writes"])
        check_level(writes, self._settings.quiet)
        return answer_of(write_tunables(writes))

    # ---- children --------------------------------------------------------------------------

    def _child(self, values: Values, _: Sequence[int]) -> Answer:
        self._children = {pid: fd for pid, fd in self._children.items() if not _has_ended(fd)}
        if len(self._children) >= MAX_READERS:
            raise OSError(EMFILE, "too many children are stuck")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            pid = os.fork()
            if not pid:
                CHILDREN[values["kind"]].begin(ours.fileno(), self._policy)
            self._children[pid] = os.pidfd_open(pid)  # ESRCH if it has ended already
            return Answer(NUMBER.pack(pid), (theirs.detach(),))

    def _end_child(self, values: Values, _: Sequence[int]) -> Answer:
        fd = self._children.get(values["pid"])
        if fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        return Answer()


def _watched(fd: int, mask: int, descriptors: Sequence[int]) -> Answer:
    """Have the daemon's descriptor of inotify watch what is open as a path; close that."""
    try:
        if len(descriptors) != 1 or mask & ~(_MASK | _IN_DONT_FOLLOW):
            raise OSError(EINVAL, "needs a descriptor of inotify, and events that are served")
        # `fd` is no link, only its name below is one
        watch = libc().add_watch(descriptors[0], f"/proc/self/fd/{fd}", mask & ~_IN_DONT_FOLLOW)
        return Answer(NUMBER.pack(watch))
    finally:
        os.close(fd)


def _is_ours(tgid: int) -> bool:
    """Whether a process is this one, or a child of it that reads."""
    with suppress(OSError, IndexError, ValueError):
        return os.getpid() in {tgid, int(field(tgid, b"PPid")[0])}
    return False


def _has_ended(pidfd: int) -> bool:
    """Whether a child has ended; then its descriptor is closed."""
    waiting = poll()
    waiting.register(pidfd)
    if not waiting.poll(0):
        return False
    os.close(pidfd)
    return True


# The program of the broker: the daemon's helper, and the only process that keeps rights (D23).
#
# It sets affinities, and reads and opens what an unprivileged daemon may not. It decides nothing
# and parses nothing that a pod, a guest, QEMU or Kata wrote: it looks at what the kernel shows of a
# process, and hands on bytes and descriptors as they are. Whatever the daemon asks, it touches only
#
# - threads of processes that it verified itself (policy.py), and kernel threads that work for one;
# - files, folders and sockets of its table (rows.py), whose paths it makes itself of ids, without
#   following a link.
#
# The first message comes from the daemon while that is still root, and has its settings; nothing
# later widens what they allow. The broker ends when the daemon's end of the socket does. It uses
# the standard library only. docs/broker.md has the protocol.

NAME: Final = "kata-pin-broker"

_RIGHTS: Final = (*(CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_NICE, CAP_SYS_PTRACE),)
_RIGHTS_OF_OTHERS: Final = (*_RIGHTS, CAP_DAC_OVERRIDE, CAP_SETUID)
"""Root may connect to root's sockets, and irqbalance takes it for root."""


def main(number: int) -> None:
    """Take the first message from the socket of that number, then serve until the daemon ends."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with the daemon; children are not awaited
    libc().set_name(NAME)
    libc().keep_rights(_RIGHTS_OF_OTHERS if os.geteuid() else _RIGHTS)
    libc().hide()
    with socket.socket(fileno=number) as channel:
        setup = channel.recv(MAX_MESSAGE)
        if not setup:
            return
        operations = Operations(VmmPolicy(parse_settings(setup)))
        try:
            channel.send(ANSWER.pack(0, 0))
            serve(channel, operations.run)
        except (BrokenPipeError, ConnectionResetError):
            return  # the daemon was killed while it started
        finally:
            operations.end()
