#!/usr/bin/python3 -IS
"""The OCI hook: hands the state on stdin to the daemon and ends.

    kata-pin-hook PHASE [--runtime-dir=DIR] [--record-ms=N] [--pin-ms=N] [--strict]

It sends `KP1 <phase> <boottime_ns> <pid> <length>` and the bytes of stdin over DIR/hook.sock and
waits for `recorded`: the message is in the daemon's registry. For createRuntime and prestart it
then waits for `pinned`, so that the pins are applied before the workload runs. Without `recorded`
in time the same bytes go to a file in DIR/spool, where the daemon finds them later. The exit status
is always 0, except in strict mode, which fails a createRuntime or prestart without `pinned`.

Every container of the node waits for this program. So it imports only what is built into the
interpreter (`posix` and `_socket`, not `os` and `socket`: those would add 1 and 6 ms to its 8),
does not parse the state, never forks, prints nothing to stdout, and needs no environment, no cwd
and no open descriptor. Every wait has a deadline.
"""

import posix
import sys
import time
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM, socket
from select import select

PHASES = ("createRuntime", "prestart", "createContainer", "poststart", "poststop")
PINNED_PHASES = ("createRuntime", "prestart")
MAX_STATE_BYTES = 4 * 1024 * 1024
MAX_REPLY_BYTES = 1024
STDIN_S = 1.0  # runtimes write the state at once
UNINSTALLED = "uninstalled"  # a file in the spool: this hook was left behind
MAX_SPOOLED = 10_000  # messages; a busy node makes some hundreds an hour
MAX_SPOOLED_NS = 24 * 3600 * 10**9  # if nobody read the oldest for so long, nobody will soon
FREE_CPUS = "free-cpus"  # a file of the daemon's: the CPUs that are nobody's alone
MAX_MASK_BYTES = 2050  # 8,192 CPUs
RETRY_S = 0.005  # connect(2) to a full backlog fails at once with EAGAIN instead of waiting


class Problem(Exception):  # noqa: N818 - not all are errors: `unpinned` can be an answer
    """Why the message was not handed over, or the pins are not applied: one line of text."""


class Arguments:
    """The command line, taken apart by hand: argparse would cost more than all the rest."""

    def __init__(self, arguments: list[str]) -> None:
        self.phase = ""
        self.runtime_dir = "/run/kata-pin"
        self.record_s = 0.25  # a commit takes 1 ms; of 200 hooks at once on 2 CPUs some need 100
        self.pin_s = 0.2  # from `recorded` on; 0: do not wait for pins
        for argument in arguments:
            self._take(argument)
        if not self.phase:
            raise Problem("no phase given")

    def _take(self, argument: str) -> None:
        name, _, value = argument.partition("=")
        if argument in PHASES:
            self.phase = argument
        elif name == "--runtime-dir":
            self.runtime_dir = value
        elif name == "--record-ms" and value.isdigit():
            self.record_s = int(value) / 1000
        elif name == "--pin-ms" and value.isdigit():
            self.pin_s = int(value) / 1000
        elif argument != "--strict":
            raise Problem(f"unknown argument {argument[:80]!r}")


class Deadline:
    """A moment by which a wait ends."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds left; raises TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        return left


class DaemonConnection:
    """The connection to the daemon; every method raises OSError."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        self._socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
        self._received = b""
        while True:
            self._socket.settimeout(deadline.left())
            try:
                self._socket.connect(path)
            except BlockingIOError:
                time.sleep(RETRY_S)
            else:
                return

    def send(self, request: bytes, deadline: Deadline) -> None:
        """Send all of the request."""
        self._socket.settimeout(deadline.left())
        self._socket.sendall(request)

    def answer(self, deadline: Deadline) -> str:
        """Return the next line of the answer."""
        while b"\n" not in self._received:
            self._socket.settimeout(deadline.left())
            piece = self._socket.recv(MAX_REPLY_BYTES)
            if not piece or len(self._received) > MAX_REPLY_BYTES:
                raise ConnectionError("connection closed by the daemon")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("ascii", "replace")


def leave_exclusive_cpus(runtime_dir: str) -> None:
    """Run where no pod has exclusive CPUs; anywhere, if the daemon did not say where that is."""
    try:
        flags = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
        file = posix.open(f"{runtime_dir}/{FREE_CPUS}", flags)
        try:
            mask = int(posix.read(file, MAX_MASK_BYTES), 16)
        finally:
            posix.close(file)
        posix.sched_setaffinity(0, [cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1])
    except (OSError, ValueError):  # also where our cgroup allows none of them
        pass


def read_state() -> bytes:
    """Return all of stdin; a state that is too large is read to its end too.

    A runtime must not fail on a broken pipe.
    """
    if sys.stdin is None:  # closed: descriptor 0 may be another file by now
        raise Problem("stdin is closed")
    deadline = Deadline(STDIN_S)
    pieces, size = [], 0
    while True:
        if not select([0], [], [], deadline.left())[0]:
            continue
        piece = posix.read(0, 1 << 20)
        if not piece:
            break
        size += len(piece)
        if size <= MAX_STATE_BYTES:
            pieces.append(piece)
    if not 0 < size <= MAX_STATE_BYTES:
        raise Problem(f"state has {size} bytes, expected 1 to {MAX_STATE_BYTES}")
    return b"".join(pieces)


def spool(folder: str, name: str, request: bytes) -> None:
    """Leave the request as a file, which gets its final name once it is complete and on disk.

    A daemon that is down for days must not fill /run, which the node needs: it finds the containers
    without messages too.
    """
    # the folder is the daemon's, so what is in it, or in its place, may be a trap for root
    here = posix.open(
        folder, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
    )
    try:
        refuse_full(here, int(name.partition("-")[0]))
        leave(here, name, request)
    finally:
        posix.close(here)


def leave(folder: int, name: str, request: bytes) -> None:
    """Write the request to a new file in an open folder."""
    unfinished = f"{name}.tmp"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC
    file = posix.open(unfinished, flags, 0o600, dir_fd=folder)
    try:
        posix.fchown(file, -1, posix.fstat(folder).st_gid)  # the daemon is not root
        posix.fchmod(file, 0o640)
        while request:
            request = request[posix.write(file, request) :]
        posix.fsync(file)
        posix.rename(unfinished, f"{name}.msg", src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        posix.unlink(unfinished, dir_fd=folder)
        raise
    finally:
        posix.close(file)


def refuse_full(folder: int, stamp_ns: int) -> None:
    """Raise OSError where no message should be added to an open folder."""
    names, oldest_ns = 0, stamp_ns
    with posix.scandir(folder) as entries:  # of a million names no more than these are read
        for entry in entries:
            stamp = entry.name.partition("-")[0]
            if entry.name == UNINSTALLED:
                raise OSError("kata-pin is uninstalled, but this hook is still configured")
            if stamp.isdecimal():
                oldest_ns = min(oldest_ns, int(stamp))
            names += 1
            if names >= MAX_SPOOLED:
                raise OSError(f"{names} messages are waiting")
    if stamp_ns - oldest_ns > MAX_SPOOLED_NS:
        raise OSError("messages have been waiting for more than a day")
    disk = posix.statvfs(folder)
    if disk.f_bavail * 10 < disk.f_blocks:
        raise OSError("less than 10 % of its file system is free")


def hand_over(options: Arguments) -> None:
    """Do the hook's work; raises Problem if the message or the pins are not confirmed."""
    stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    leave_exclusive_cpus(options.runtime_dir)
    state = read_state()
    header = f"KP1 {options.phase} {stamp} {posix.getpid()} {len(state)}\n"
    request = header.encode() + state
    deadline = Deadline(options.record_s)
    try:
        daemon = DaemonConnection(f"{options.runtime_dir}/hook.sock", deadline)
        daemon.send(request, deadline)
        expect("recorded", daemon.answer(deadline))
    except OSError as error:
        try:
            spool(f"{options.runtime_dir}/spool", f"{stamp}-{posix.getpid()}", request)
        except OSError as lost:
            both = f"neither recorded ({reason(error)}) nor spooled ({reason(lost)})"
            raise Problem(both) from lost
        raise Problem(f"spooled, not recorded: {reason(error)}") from error
    if options.phase in PINNED_PHASES and options.pin_s:
        try:
            expect("pinned", daemon.answer(Deadline(options.pin_s)))
        except OSError as error:
            raise Problem(f"recorded, pins not confirmed: {reason(error)}") from error


def reason(error: OSError) -> str:
    """Return what failed, without the number of the error."""
    return error.strerror or str(error)


def expect(word: str, line: str) -> None:
    """Raise Problem for the daemon's refusal, ConnectionError for an unknown answer."""
    if line.startswith(("refused ", "unpinned ")):
        raise Problem(line[:300])
    if line != word:
        raise ConnectionError(f"unexpected answer {line[:80]!r}")


def complain(text: str) -> None:
    """Write one line to stderr, if it is open and takes it at once."""
    if sys.stderr is None:  # closed: descriptor 2 may be the socket by now
        return
    line = f"kata-pin-hook: {text}".encode("ascii", "backslashreplace")
    try:
        if select([], [2], [], 0)[1]:
            posix.write(2, line.replace(b"\n", b" ") + b"\n")
    except OSError:
        pass


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    strict = "--strict" in arguments and any(phase in arguments for phase in PINNED_PHASES)
    try:
        hand_over(Arguments(arguments))
    except Exception as problem:  # noqa: BLE001 - a fault here must not fail a container
        complain(str(problem) or repr(problem))
        return 1 if strict else 0
    return 0


if __name__ == "__main__":
    posix._exit(main(sys.argv[1:]))  # skip the interpreter's teardown, which takes a millisecond
