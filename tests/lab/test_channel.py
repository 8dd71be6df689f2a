"""The host's channel against the real agent, as a process of its own on a socket pair."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import frames, process, transfer
from tests.lab.channel import Channel
from tests.lab.errors import DeadlineError, LabError
from tests.lab.settings import PROJECT

_AGENT = "import sys; from tests.lab.agent import *; Server(Port(int(sys.argv[1]))).serve()"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """Our end of the agent's port, and the agent."""
    ours, theirs = socket.socketpair()
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=PROJECT,
    )
    theirs.close()
    ours.setblocking(False)
    try:
        yield ours, agent
    finally:
        ours.close()
        agent.kill()
        agent.wait()


@pytest.fixture
def channel(ends: tuple[socket.socket, subprocess.Popen[bytes]]) -> Iterator[Channel]:
    """A channel in step with the agent."""
    lock = os.open(os.devnull, os.O_RDONLY)
    with Channel(ends[0], lock) as made:
        made.greet(10)
        yield made


def test_output_errors_and_code_come_back(channel: Channel) -> None:
    """Both outputs arrive apart and whole, with the exit code."""
    done = channel.run(["sh", "-c", "echo out; echo err >&2; exit 7"], deadline_s=10)
    assert (done.code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_a_signal_is_a_code(channel: Channel) -> None:
    """Death by signal n is 128 + n, as a shell says."""
    assert channel.run(["sh", "-c", "kill -9 $$"], deadline_s=10).code == 137


def test_input_larger_than_any_buffer_passes(channel: Channel) -> None:
    """Four megabytes of bytes that need escaping go in and come out unchanged."""
    data = (frames.END + frames.ESC + os.urandom(62)) * 65536
    done = channel.run(["cat"], stdin=io.BytesIO(data), deadline_s=30)
    assert done.stdout == data


def test_a_command_that_does_not_read_its_input_ends(channel: Channel) -> None:
    """Input that nobody wants is dropped, not waited for."""
    assert channel.run(["true"], stdin=io.BytesIO(b"x" * 3_000_000), deadline_s=20).code == 0


def test_a_child_left_behind_does_not_delay_the_end(channel: Channel) -> None:
    """The command's end counts, though a daemon that it left holds its output open."""
    script = "sleep 30 & echo done"
    done = channel.run(["sh", "-c", script], deadline_s=10)
    assert done.stdout == b"done\n"


def test_the_deadline_kills_the_whole_session(channel: Channel, tmp_path: Path) -> None:
    """After the deadline no process of the command is alive, and the channel still works."""
    script = f"sleep 300 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(DeadlineError, match="over 1 s"):
        channel.run(["sh", "-c", script], deadline_s=1)
    pid = int((tmp_path / "pid").read_text())
    limit = time.monotonic() + 5
    while process.start_time(pid):
        assert time.monotonic() < limit, "alive after its command was killed"
        time.sleep(0.01)
    assert channel.run(["echo", "again"], deadline_s=10).stdout == b"again\n"


def test_a_missing_command_is_an_error_that_names_it(channel: Channel) -> None:
    """The agent's refusal arrives as a LabError."""
    with pytest.raises(LabError, match="no-such-command could not be started"):
        channel.run(["no-such-command"], deadline_s=10)


def test_a_new_client_is_not_disturbed_by_the_old_ones_command(
    ends: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    """After a client broke off in the middle of a frame, hello ends its command and its output."""
    old = frames.encode(frames.RUN, b'{"argv": ["yes"]}')
    ends[0].sendall(old + frames.encode(frames.INPUT, b"abc")[:4])
    with Channel(ends[0], os.open(os.devnull, os.O_RDONLY)) as channel:
        channel.greet(10)
        assert channel.run(["echo", "mine"], deadline_s=10).stdout == b"mine\n"


def test_an_agent_that_goes_away_is_an_error(
    ends: tuple[socket.socket, subprocess.Popen[bytes]], channel: Channel
) -> None:
    """The end of the machine ends the wait at once."""
    ends[1].kill()
    with pytest.raises(LabError, match="went away"):
        channel.run(["sleep", "100"], deadline_s=30)


def test_trees_are_copied_both_ways(channel: Channel, tmp_path: Path) -> None:
    """put and get keep names, contents and modes."""
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_bytes(os.urandom(300_000))
    (source / "tool").write_text("#!/bin/sh\n")
    (source / "tool").chmod(0o755)
    transfer.put(channel, [str(source)], f"{tmp_path}/there", deadline_s=20)
    transfer.get(channel, [f"{tmp_path}/there/tree"], f"{tmp_path}/back", deadline_s=20)
    back = tmp_path / "back/tree"
    assert (back / "sub/file").read_bytes() == (source / "sub/file").read_bytes()
    assert back.joinpath("tool").stat().st_mode == source.joinpath("tool").stat().st_mode


def test_put_of_nothing_and_get_of_nothing_say_so(channel: Channel, tmp_path: Path) -> None:
    """A missing source is named, on either side."""
    with pytest.raises(LabError, match="absent: no such file"):
        transfer.put(channel, [f"{tmp_path}/absent"], "/tmp", deadline_s=10)
    with pytest.raises(LabError, match="get from /absent/file failed"):
        transfer.get(channel, ["/absent/file"], f"{tmp_path}/back", deadline_s=10)
