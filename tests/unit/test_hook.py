"""The hook program against daemons that answer, refuse, stall and are not there."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kata_pin import hook
from kata_pin.peers.oci import Phase
from kata_pin.records import hooks
from kata_pin.records.hooks import HookConnection, HookMessage, Spool
from tests.support.hooks import (
    COMMAND,
    PATIENT,
    STATE,
    HookDaemon,
    gone_within,
    run_hook,
    runtime_directory,
    spooled,
)

BUDGET_S = 0.25 + 0.2
START_S = 3.0  # the interpreter's start on a busy machine; no wait of the hook's


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with runtime_directory() as path:
        yield path


def only_spooled(runtime_dir: Path) -> HookMessage:
    [file] = spooled(runtime_dir)
    message = hooks.decode(file.read_bytes())
    assert file.name == message.spool_name
    return message


def _left(folder: Path) -> set[int]:
    """Return where a thread may run that left exclusive CPUs."""
    with ThreadPoolExecutor(1) as other:
        other.submit(hook.leave_exclusive_cpus, str(folder)).result()
        return other.submit(os.sched_getaffinity, 0).result()


def test_exclusive_cpus_are_left(tmp_path: Path) -> None:
    """A hook runs where the daemon says that nobody has exclusive CPUs."""
    last = max(os.sched_getaffinity(0))
    (tmp_path / hook.FREE_CPUS).write_text(f"{1 << last | 1 << 8191:x}\n")
    assert _left(tmp_path) == {last}


@pytest.mark.parametrize("text", ["", "zz", "0", f"{1 << 8191:x}", "f" * 5000])
def test_a_strange_mask_changes_nothing(tmp_path: Path, text: str) -> None:
    """Nor fails the hook: what is no mask, no CPU, or none of this machine."""
    everywhere = os.sched_getaffinity(0)
    (tmp_path / hook.FREE_CPUS).write_text(text)
    assert _left(tmp_path) == everywhere


def test_a_mask_that_is_no_file_changes_nothing(tmp_path: Path) -> None:
    """The daemon's user can put anything there; opening a FIFO would hang."""
    everywhere = os.sched_getaffinity(0)
    assert _left(tmp_path) == everywhere
    file = tmp_path / hook.FREE_CPUS
    os.mkfifo(file)
    assert _left(tmp_path) == everywhere
    file.unlink()
    file.symlink_to("/proc/self/loginuid")
    assert _left(tmp_path) == everywhere


@pytest.mark.parametrize("phase", list(Phase))
def test_hands_over_phase_stamp_and_bytes(runtime_dir: Path, phase: Phase) -> None:
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


def test_phases_are_those_of_the_wire() -> None:
    """The hook, which imports nothing of the package, knows the same phases and bounds."""
    assert set(hook.PHASES) == {phase.value for phase in Phase}
    assert set(hook.PINNED_PHASES) == {p.value for p in Phase if p.waits_for_pins}
    assert hook.MAX_STATE_BYTES == hooks.MAX_BODY


@pytest.mark.parametrize("phase", [Phase.CREATE_RUNTIME, Phase.PRESTART])
def test_waits_for_pins(runtime_dir: Path, phase: Phase) -> None:
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


@pytest.mark.parametrize("phase", [Phase.POSTSTART, Phase.POSTSTOP, Phase.CREATE_CONTAINER])
def test_other_phases_do_not_wait_for_pins(runtime_dir: Path, phase: Phase) -> None:
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

    async def never_pin(connection: HookConnection) -> None:
        await connection.recorded()
        assert await gone_within(connection, 5)

    with HookDaemon(runtime_dir, never_pin):
        run = run_hook(runtime_dir, "prestart", "--pin-ms=80")
    assert (run.status, spooled(runtime_dir)) == (0, [])
    assert "recorded, pins not confirmed" in run.stderr
    assert run.seconds < BUDGET_S + START_S


def test_no_wait_for_pins(runtime_dir: Path) -> None:
    """With a pin budget of 0 the hook ends with `recorded`, in strict mode too."""

    async def never_pin(connection: HookConnection) -> None:
        await connection.recorded()
        assert await gone_within(connection, 5)

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
    assert (message.phase, message.body) == (Phase.CREATE_RUNTIME, STATE)
    assert stat.S_IMODE(spooled(runtime_dir)[0].stat().st_mode) == 0o640


def test_dead_daemon(runtime_dir: Path) -> None:
    """A socket without a listener counts as none."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runtime_dir / "hook.sock"))
    assert run_hook(runtime_dir, "poststop").status == 0
    assert only_spooled(runtime_dir).phase is Phase.POSTSTOP


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
    assert only_spooled(runtime_dir).key == daemon.messages[0].key


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
    spool = Spool(str(runtime_dir / "spool"))
    spool.retire()
    run = run_hook(runtime_dir, Phase.POSTSTART)
    assert (run.status, os.listdir(runtime_dir / "spool")) == (0, [hook.UNINSTALLED])
    assert "kata-pin is uninstalled" in run.stderr
    assert list(spool.pending()) == []
    spool.prepare()
    run_hook(runtime_dir, Phase.POSTSTART)
    only_spooled(runtime_dir)


def test_a_spool_that_nobody_reads_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of messages, and by the age of the oldest."""
    assert hook.MAX_SPOOLED == hooks.MAX_SPOOLED
    monkeypatch.setattr(hook, "MAX_SPOOLED", 3)
    newest = 5 + hook.MAX_SPOOLED_NS
    (tmp_path / "5-1.msg").touch()
    (tmp_path / f"{newest}-1.msg").touch()
    with pytest.raises(OSError, match="more than a day"):
        hook.spool(str(tmp_path), f"{newest + 1}-2", b"x")
    (tmp_path / "6-1.msg").touch()
    with pytest.raises(OSError, match="3 messages are waiting"):
        hook.spool(str(tmp_path), "7-2", b"x")
    assert sorted(os.listdir(tmp_path)) == ["5-1.msg", "6-1.msg", f"{newest}-1.msg"]


@pytest.mark.root
def test_full_disk_keeps_its_reserve(runtime_dir: Path) -> None:
    """With less than 10 % free nothing is spooled, and no half file stays."""
    script = (
        f"mount -t tmpfs -o size=400k tmpfs {runtime_dir}/spool && "
        f"head -c 380000 /dev/zero > {runtime_dir}/spool/ballast && "
        f"{' '.join(COMMAND)} poststart --runtime-dir={runtime_dir}; "
        f"echo $? $(ls {runtime_dir}/spool)"
    )
    out = in_private_mounts(script)
    assert out.stdout == "0 ballast\n"
    assert "less than 10 %" in out.stderr


@pytest.mark.root
def test_disk_that_fills_up_leaves_no_half_file(runtime_dir: Path) -> None:
    """ENOSPC in the middle of a write takes the unfinished file away again."""
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {runtime_dir}/spool && "
        f"head -c 100000 /dev/zero | {' '.join(COMMAND)} poststart --runtime-dir={runtime_dir}; "
        f"echo $? $(ls {runtime_dir}/spool)"
    )
    out = in_private_mounts(script)
    assert out.stdout == "0\n"
    assert "No space left on device" in out.stderr


@pytest.mark.root
def test_read_only_spool(runtime_dir: Path) -> None:
    """A spool that cannot be written loses the message, but never fails the container."""
    script = (
        f"mount -t tmpfs -o ro tmpfs {runtime_dir}/spool && "
        f"{' '.join(COMMAND)} poststart --runtime-dir={runtime_dir}; echo $?"
    )
    out = in_private_mounts(script)
    assert out.stdout == "0\n"
    assert "Read-only file system" in out.stderr


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
        messages += [hooks.decode(file.read_bytes()) for file in spooled(runtime_dir)]
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
    state = b"x" * hook.MAX_STATE_BYTES
    with HookDaemon(runtime_dir) as daemon:
        assert run_hook(runtime_dir, "createRuntime", state=state).status == 0
    assert daemon.messages[0].body == state
    assert run_hook(runtime_dir, "createRuntime", state=state).status == 0
    assert only_spooled(runtime_dir).body == state


@pytest.mark.parametrize("size", [0, hook.MAX_STATE_BYTES + 1])
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
    assert hook.STDIN_S < took < hook.STDIN_S + START_S


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


@pytest.mark.parametrize("phase", list(Phase))
def test_strict_without_daemon(runtime_dir: Path, phase: Phase) -> None:
    """Strict mode fails createRuntime and prestart, where a runtime heeds it, and no other."""
    run = run_hook(runtime_dir, phase, "--strict")
    assert run.status == (1 if phase.waits_for_pins else 0)
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
