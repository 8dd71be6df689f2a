"""The hook program against daemons that answer, refuse, stall and are not there.

It is run as runtimes run it: by its process, its socket and its spool.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hooks import (
    COMMAND,
    PATIENT,
    STATE,
    HookConnection,
    HookDaemon,
    HookMessage,
    gone_within,
    run_hook,
    runtime_directory,
    spooled,
    spooled_messages,
)

PHASES = ("createRuntime", "prestart", "createContainer", "poststart", "poststop")
PINNED_PHASES = PHASES[:2]
MAX_STATE_BYTES = 4 << 20
STDIN_S = 1.0

BUDGET_S = 0.25 + 0.2
START_S = 3.0  # the interpreter's start on a busy machine; no wait of the hook's


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with runtime_directory() as path:
        yield path


def only_spooled(runtime_dir: Path) -> HookMessage:
    [message] = spooled_messages(runtime_dir)
    return message


async def never_pin(connection: HookConnection) -> None:
    await connection.recorded()
    assert await gone_within(connection, 5)


@pytest.mark.parametrize("phase", PHASES)
def test_hands_over_phase_stamp_and_bytes(runtime_dir: Path, phase: str) -> None:
    """The daemon gets the very bytes of stdin, the phase, a boot time stamp and the hook's pid."""
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with HookDaemon(runtime_dir) as daemon:
        run = run_hook(runtime_dir, phase)
    after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    [message] = daemon.messages
    assert (message.phase, message.body) == (phase, STATE)
    assert before < message.stamp_ns < after
    assert message.pid != os.getpid()
    assert spooled(runtime_dir) == []


@pytest.mark.parametrize("phase", PINNED_PHASES)
def test_waits_for_pins(runtime_dir: Path, phase: str) -> None:
    """createRuntime and prestart end after `pinned`, not after `recorded`."""
    left = []

    async def pin_late(connection: HookConnection) -> None:
        await connection.recorded()
        left.append(await gone_within(connection, 0.1))
        await connection.pinned()
        left.append(await gone_within(connection, 5))

    with HookDaemon(runtime_dir, pin_late):
        run = run_hook(runtime_dir, phase)
    assert (run.status, run.stderr, left) == (0, "", [False, True])


@pytest.mark.parametrize("phase", PHASES[2:])
def test_other_phases_do_not_wait_for_pins(runtime_dir: Path, phase: str) -> None:
    """The other phases end with `recorded`, however long the daemon works afterwards."""
    left = []

    async def work_on(connection: HookConnection) -> None:
        await connection.recorded()
        left.append(await gone_within(connection, 5))

    with HookDaemon(runtime_dir, work_on):
        assert run_hook(runtime_dir, phase).status == 0
    assert left == [True]


def test_pins_too_late(runtime_dir: Path) -> None:
    """Without `pinned` in its budget the hook exits 0 and does not spool what is recorded."""
    with HookDaemon(runtime_dir, never_pin):
        run = run_hook(runtime_dir, "prestart", "--pin-ms=80")
    assert (run.status, spooled(runtime_dir)) == (0, [])
    assert "recorded, pins not confirmed" in run.stderr
    assert run.seconds < BUDGET_S + START_S


def test_no_wait_for_pins(runtime_dir: Path) -> None:
    """With a pin budget of 0 the hook ends with `recorded`, in strict mode too."""
    with HookDaemon(runtime_dir, never_pin):
        run = run_hook(runtime_dir, "prestart", "--pin-ms=0", "--strict")
    assert (run.status, run.stderr) == (0, "")


def test_refused_is_not_spooled(runtime_dir: Path) -> None:
    """A message that can never be taken is not kept for later."""

    async def refuse(connection: HookConnection) -> None:
        await connection.refused("not JSON")

    with HookDaemon(runtime_dir, refuse):
        run = run_hook(runtime_dir, "poststart")
    assert (run.status, spooled(runtime_dir)) == (0, [])
    assert run.stderr == "kata-pin-hook: refused not JSON\n"


def test_absent_daemon(runtime_dir: Path) -> None:
    """Without a daemon the message is in the spool: mode 0640, whole, and nothing beside it."""
    run = run_hook(runtime_dir, "createRuntime")
    assert run.status == 0
    message = only_spooled(runtime_dir)
    assert (message.phase, message.body) == ("createRuntime", STATE)
    assert stat.S_IMODE(spooled(runtime_dir)[0].stat().st_mode) == 0o640


def test_dead_daemon(runtime_dir: Path) -> None:
    """A socket without a listener counts as none."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runtime_dir / "hook.sock"))
    assert run_hook(runtime_dir, "poststop").status == 0
    assert only_spooled(runtime_dir).phase == "poststop"


@pytest.mark.parametrize("backlog", [8, 0])
def test_hung_daemon(runtime_dir: Path, backlog: int) -> None:
    """A daemon that never answers, or whose backlog is full, costs the record budget."""
    with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as first:
        hung.bind(str(runtime_dir / "hook.sock"))
        hung.listen(backlog)
        first.connect(str(runtime_dir / "hook.sock"))  # fills a backlog of 0
        run = run_hook(runtime_dir, "createRuntime", "--record-ms=80")
    assert run.status == 0
    assert 0.08 < run.seconds < BUDGET_S + START_S
    assert only_spooled(runtime_dir).body == STATE


@pytest.mark.parametrize(
    "answer",
    [b"", b"rec", b"pinned\n", b"\xff\n"],
    ids=["none", "half", "out-of-turn", "nonsense"],
)
def test_daemon_that_breaks_off(runtime_dir: Path, answer: bytes) -> None:
    """A daemon that dies, or babbles, before `recorded` gets the message by the spool."""

    async def break_off(connection: HookConnection) -> None:
        connection.transport.write(answer)

    with HookDaemon(runtime_dir, break_off) as daemon:
        run = run_hook(runtime_dir, "prestart")
    assert run.status == 0
    assert only_spooled(runtime_dir) == daemon.messages[0]


def test_endless_answer(runtime_dir: Path) -> None:
    """A line that does not end is not collected until the deadline."""

    async def babble(connection: HookConnection) -> None:
        connection.transport.write(b"x" * 5000)
        assert await gone_within(connection, 4)

    with HookDaemon(runtime_dir, babble):
        assert run_hook(runtime_dir, "prestart").status == 0
    assert only_spooled(runtime_dir).body == STATE


def test_acked_late_and_spooled_is_one_message(runtime_dir: Path) -> None:
    """A message that is both recorded late and spooled has the same identity both times."""

    async def record_late(connection: HookConnection) -> None:
        assert await gone_within(connection, 5)
        await connection.recorded()

    with HookDaemon(runtime_dir, record_late) as daemon:
        assert run_hook(runtime_dir, "poststart", "--record-ms=50").status == 0
    [message] = daemon.messages
    assert only_spooled(runtime_dir) == message


def test_no_runtime_directory(tmp_path: Path) -> None:
    """Without a runtime directory, as before an installation is complete, nothing fails."""
    run = run_hook(tmp_path / "absent", "createRuntime")
    assert run.status == 0
    assert "neither recorded" in run.stderr


def test_a_hook_that_was_left_behind_does_not_spool(runtime_dir: Path) -> None:
    """After uninstall nobody would ever read it; a daemon that starts ends that."""
    (runtime_dir / "spool/uninstalled").touch()
    run = run_hook(runtime_dir, "poststart")
    assert (run.status, os.listdir(runtime_dir / "spool")) == (0, ["uninstalled"])
    assert "kata-pin is uninstalled" in run.stderr
    (runtime_dir / "spool/uninstalled").unlink()
    run_hook(runtime_dir, "poststart")
    only_spooled(runtime_dir)


@pytest.mark.root
@pytest.mark.parametrize(
    ("mount", "before", "left", "why"),
    [
        ("size=400k", "head -c 380000 /dev/zero > ballast;", "ballast", "less than 10 %"),
        ("size=64k", "head -c 100000 /dev/zero |", "", "No space left on device"),
        ("ro", "", "", "Read-only file system"),
    ],
    ids=["full: its reserve is kept", "it fills up: no half file stays", "read-only"],
)
def test_a_disk_that_takes_no_message(
    runtime_dir: Path, mount: str, before: str, left: str, why: str
) -> None:
    """The message is lost, but the container never fails."""
    spool = runtime_dir / "spool"
    call = f"{before} {' '.join(COMMAND)} poststart --runtime-dir={runtime_dir}"
    script = f"mount -t tmpfs -o {mount} tmpfs {spool} && cd {spool} && {call}"
    out = in_private_mounts(f"{script}; echo $? $(ls {spool})")
    assert out.stdout.split() == ["0", *left.split()]
    assert why in out.stderr


def in_private_mounts(script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace of its own, the state on stdin."""
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        input=STATE.decode(),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize("daemon_up", [True, False])
def test_deleted_cwd(runtime_dir: Path, tmp_path: Path, *, daemon_up: bool) -> None:
    """A working directory that is gone does not matter."""
    command = f"cd {tmp_path} && rmdir {tmp_path} && exec " + " ".join(COMMAND)
    command += f" createRuntime {' '.join(PATIENT)} --runtime-dir={runtime_dir}"
    if daemon_up:
        with HookDaemon(runtime_dir) as daemon:
            done = subprocess.run(["sh", "-c", command], input=STATE, check=False, timeout=20)
        assert daemon.messages[0].body == STATE
    else:
        done = subprocess.run(["sh", "-c", command], input=STATE, check=False, timeout=20)
        assert only_spooled(runtime_dir).body == STATE
    assert done.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("daemon_up", [True, False])
def test_closed_descriptors(runtime_dir: Path, closed: str, *, daemon_up: bool) -> None:
    """Descriptors 0 to 2 may be closed: what takes their number is never mistaken for them."""
    command = f"{' '.join([*COMMAND, *PATIENT])} createRuntime --runtime-dir={runtime_dir} {closed}"
    messages: list[HookMessage] = []

    async def unpin(connection: HookConnection) -> None:
        messages.append(connection.message)
        await connection.recorded()
        await connection.unpinned("so that the hook has something to complain about")
        assert await gone_within(connection, 5)

    if daemon_up:
        with HookDaemon(runtime_dir, unpin):
            done = subprocess.run(["sh", "-c", command], input=STATE, check=False, timeout=20)
    else:
        done = subprocess.run(["sh", "-c", command], input=STATE, check=False, timeout=20)
        messages += spooled_messages(runtime_dir)
    assert done.returncode == 0
    assert [m.body for m in messages] == ([] if "<&-" in closed else [STATE])


@pytest.mark.parametrize("other", ["", ">&-"])
def test_closed_stdin_is_named(runtime_dir: Path, other: str) -> None:
    """A closed stdin is told from an empty one."""
    command = f"{' '.join(COMMAND)} poststop --runtime-dir={runtime_dir} <&- {other}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (0, b"kata-pin-hook: stdin is closed\n")


def test_largest_state(runtime_dir: Path) -> None:
    """A state of 4 MiB passes, by the socket and by the spool."""
    state = b"x" * MAX_STATE_BYTES
    with HookDaemon(runtime_dir) as daemon:
        assert run_hook(runtime_dir, "createRuntime", state=state).status == 0
    assert daemon.messages[0].body == state
    assert run_hook(runtime_dir, "createRuntime", state=state).status == 0
    assert only_spooled(runtime_dir).body == state


@pytest.mark.parametrize("size", [0, MAX_STATE_BYTES + 1])
def test_state_that_is_not_taken(runtime_dir: Path, size: int) -> None:
    """No state, and one that is too large, end with one line and exit 0."""
    with HookDaemon(runtime_dir) as daemon:
        run = run_hook(runtime_dir, "createRuntime", state=b"x" * size)
    assert run.status == 0
    assert run.stderr == f"kata-pin-hook: state has {size} bytes, expected 1 to 4194304\n"
    assert (daemon.messages, spooled(runtime_dir)) == ([], [])


def test_stdin_that_never_ends(runtime_dir: Path) -> None:
    """A runtime that does not close stdin holds the hook for its deadline only."""
    reader, writer = os.pipe()
    try:
        start = time.monotonic()
        done = subprocess.run(
            [*COMMAND, "createRuntime", f"--runtime-dir={runtime_dir}"],
            stdin=reader, stderr=subprocess.PIPE, check=False, timeout=20,
        )  # fmt: skip
        took = time.monotonic() - start
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 0
    assert STDIN_S < took < STDIN_S + START_S


def test_broken_stderr(runtime_dir: Path) -> None:
    """A closed (EPIPE) or full stderr does not change the exit status."""
    reader, writer = os.pipe()
    os.close(reader)
    full_reader, full_writer = os.pipe()
    os.write(full_writer, b"x" * fcntl.fcntl(full_writer, fcntl.F_GETPIPE_SZ))
    try:
        for stderr in (writer, full_writer):
            done = subprocess.run(
                [*COMMAND, "poststart", f"--runtime-dir={runtime_dir}/absent"],
                input=STATE, stderr=stderr, check=False, timeout=20,
            )  # fmt: skip
            assert done.returncode == 0
    finally:
        for descriptor in (writer, full_reader, full_writer):
            os.close(descriptor)


@pytest.mark.parametrize(
    "arguments",
    [[], ["unknownPhase"], ["poststart", "--pin-ms=soon"], ["poststart", "--record-ms=-1"]],
    ids=" ".join,
)
def test_wrong_command_line(runtime_dir: Path, arguments: list[str]) -> None:
    """A wrong line in hooks.d is reported on stderr and does not fail containers."""
    run = run_hook(runtime_dir, *arguments)
    assert run.status == 0
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("phase", PHASES)
def test_strict_without_daemon(runtime_dir: Path, phase: str) -> None:
    """Strict mode fails createRuntime and prestart, where a runtime heeds it, and no other."""
    run = run_hook(runtime_dir, phase, "--strict")
    assert run.status == (1 if phase in PINNED_PHASES else 0)
    assert run.stderr.startswith("kata-pin-hook: spooled, not recorded: ")
    assert run.stderr.count("\n") == 1


def test_strict_with_daemon(runtime_dir: Path) -> None:
    """Strict mode fails on `unpinned`, with the daemon's reason, and passes on `pinned`."""

    async def unpin(connection: HookConnection) -> None:
        await connection.recorded()
        await connection.unpinned("no VMM found")

    with HookDaemon(runtime_dir):
        assert run_hook(runtime_dir, "prestart", "--strict").status == 0
    with HookDaemon(runtime_dir, unpin):
        assert run_hook(runtime_dir, "prestart").status == 0
        run = run_hook(runtime_dir, "prestart", "--strict")
    assert (run.status, run.stderr) == (1, "kata-pin-hook: unpinned no VMM found\n")


def test_few_descriptors(runtime_dir: Path) -> None:
    """The hook needs a handful of descriptors, whatever limit it inherits."""
    with HookDaemon(runtime_dir) as daemon:
        done = subprocess.run(
            [*COMMAND, *PATIENT, "createRuntime", f"--runtime-dir={runtime_dir}"],
            input=STATE, check=False, timeout=20,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)),
        )  # fmt: skip
    assert done.returncode == 0
    assert len(daemon.messages) == 1


@pytest.mark.root
def test_forks_nothing(runtime_dir: Path) -> None:
    """The hook works where it may not fork at all."""
    nobody_limit = ["setpriv", "--reuid=65534", "--clear-groups", "prlimit", "--nproc=1"]
    runtime_dir.chmod(0o755)
    (runtime_dir / "spool").chmod(0o777)
    done = subprocess.run(
        [*nobody_limit, *COMMAND, "poststart", f"--runtime-dir={runtime_dir}"],
        input=STATE, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0
    assert only_spooled(runtime_dir).body == STATE
