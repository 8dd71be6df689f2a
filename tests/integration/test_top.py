"""`kata-pin top` on a real terminal, about real threads, served by real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kata_pin.base.documents.measured import TopDocument
from kata_pin.base.documents.state import State
from kata_pin.service.protocol import decode
from tests.support.played_threads import played
from tests.support.pseudoterminal import Terminal
from tests.unit.cli import documents as docs
from tests.unit.conftest import Sockets

CPU = min(os.sched_getaffinity(0))
COMMAND = (sys.executable, "-m", "kata_pin.cli.main")


@contextmanager
def sandboxes() -> Iterator[State]:
    """Yield a state whose threads run: a vCPU that computes, one that sleeps, a vhost worker."""
    with played(f"spins@{CPU}", "sleeps", "sleeps", nice=10) as web, played("sleeps") as db:
        yield docs.state(
            docs.sandbox(
                "shop/web",
                str(CPU),
                web.thread(0, "vcpu", vcpu=0),
                web.thread(1, "vcpu", vcpu=1),
                web.thread(2, "vhost"),
                exclusive=str(CPU),
                shared="",
            ),
            docs.sandbox("shop/db", None, db.thread(0, "vcpu", vcpu=0)),
            cpus=max(os.sched_getaffinity(0)) + 1,
        )


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """Serve such a state; return the configuration that leads to it."""
    with sandboxes() as state:
        sockets = Sockets(tmp_path, {"state": lambda _: state})
        path = tmp_path / "config.yaml"
        path.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
        yield path
        sockets.close()


def terminal(config: Path, *options: str, columns: int = 80, lines: int = 24) -> Terminal:
    command = [*COMMAND, "--config", str(config), "top", "--interval", "0.5", *options]
    return Terminal(command, {"TERM": "xterm", "NO_COLOR": "1"}, columns, lines)


def is_as_before(one: Terminal) -> bool:
    """Whether the terminal shows what was there before, and echoes what is typed."""
    return not one.alternate and one.cursor and one.now() == one.settings


def test_a_screen_that_is_sorted_filtered_paused_and_left(config: Path) -> None:
    """What an operator does, and nothing of it stays on the terminal."""
    with terminal(config) as one:
        screen = one.shows("vcpu 1")
        assert one.alternate
        assert not one.now()[3] & termios.ECHO
        assert len(screen.split("\n")) == 24
        assert screen.index("shop/web") < screen.index("FOREIGN%")
        one.type("s")
        one.shows("sorted by cpu")
        one.type("/db\r")
        screen = one.shows("filter 'db'")
        assert "vhost" not in screen
        one.type("\x1b")
        one.shows(lambda seen: "filter" not in seen.replace("/ filter", "") and "vhost" in seen)
        one.type("e")
        one.shows("qemu-system-x86")
        one.type("h")
        one.shows("anybody else on this exclusive pCPU")
        one.type("h")
        one.type("p")
        paused = one.shows("PAUSED")
        assert one.shows("PAUSED") == paused
        one.type("q")
        assert one.ends() == 0
        assert is_as_before(one)


def test_it_follows_the_size_of_the_terminal(config: Path) -> None:
    """More columns show more, at once."""
    with terminal(config) as one:
        one.shows("not shown at this width")
        one.resize(170, 30)
        screen = one.shows("RESCHED/s")
        assert "not shown" not in screen
        assert max(map(len, screen.split("\n"))) > 80
        one.resize(40, 8)
        one.shows(lambda seen: "RESCHED/s" not in seen)
        one.type("q")
        assert one.ends() == 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_gives_the_terminal_back(
    config: Path, number: signal.Signals, status: int
) -> None:
    """However it is ended."""
    with terminal(config) as one:
        one.shows("vcpu 1")
        one.signal(number)
        assert one.ends() == status
        assert is_as_before(one)


def test_control_c_ends_it(config: Path) -> None:
    """The terminal's own key."""
    with terminal(config) as one:
        one.shows("vcpu 1")
        one.type("\x03")
        assert one.ends() == 130
        assert is_as_before(one)


def test_an_error_gives_the_terminal_back(config: Path) -> None:
    """The sockets are gone and the configuration is damaged: one line, and the shell."""
    with terminal(config) as one:
        one.shows("vcpu 1")
        os.unlink(config.parent / "status.sock")
        os.unlink(config.parent / "control.sock")
        config.write_text("version: 1\nno_such_setting: 1\n")
        assert one.ends(30) == 78
        assert is_as_before(one)
        assert "no_such_setting" in one.raw.rpartition("\x1b[?1049l")[2]


def test_control_z_gives_the_terminal_back_until_it_goes_on(config: Path) -> None:
    """The shell is usable meanwhile."""
    with terminal(config) as one:
        one.shows("vcpu 1")
        one.signal(signal.SIGTSTP)
        one.shows(lambda _: is_as_before(one))
        one.signal(signal.SIGCONT)
        one.shows(lambda seen: one.alternate and "vcpu 1" in seen)
        one.type("q")
        assert one.ends() == 0
        assert is_as_before(one)


def lines(config: Path, *options: str) -> list[TopDocument]:
    """Return the documents of `top --json --once`."""
    command = [*COMMAND, "--config", str(config), "top", "--json", "--once", *options]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return [decode(line, TopDocument) for line in done.stdout.splitlines()]


def test_one_line_a_sample(config: Path) -> None:
    """JSON lines until Ctrl-C, each a document."""
    command = [*COMMAND, "--config", str(config), "top", "--json", "--interval", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert [one["kind"] for one in found] == ["top", "top"]


def test_without_a_terminal_it_prints_one_sample(config: Path) -> None:
    """For a pipe, and for people who try it in a script."""
    command = [*COMMAND, "--config", str(config), "top", "--interval", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count("kata-pin top") == 1
    assert "shop/web" in done.stdout


def test_what_the_threads_did(config: Path) -> None:
    """A vCPU that always wants its CPU runs or waits; one that sleeps does neither."""
    (found,) = lines(config, "--interval", "1")
    web = next(one for one in found.sandboxes if one.pod == "shop/web")
    busy, idle = web.vcpus
    assert busy.cpu_percent is not None
    assert busy.wait_percent is not None
    assert busy.cpu_percent + busy.wait_percent > 80
    assert busy.last_cpu == CPU
    assert idle.cpu_percent == idle.wait_percent == 0
    (pcpu,) = found.pcpus
    assert pcpu.own_percent == busy.cpu_percent
    assert (pcpu.foreign_percent or 0) <= 100
    assert found.threads == 4


def test_an_intruder_is_seen(config: Path) -> None:
    """Another spinner beside the vCPU: what the one waits, the other has."""
    spin = f"import os; os.nice(10); os.sched_setaffinity(0, {{{CPU}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as intruder:
        try:
            (found,) = lines(config, "--interval", "2")
        finally:
            intruder.kill()
    (pcpu,) = found.pcpus
    web = next(one for one in found.sandboxes if one.pod == "shop/web")
    assert pcpu.foreign_percent is not None
    assert pcpu.foreign_percent > 20
    assert pcpu.foreign_percent >= (web.vcpus[0].wait_percent or 0) - 0.1


def test_what_this_kernel_cannot_tell_is_null(config: Path) -> None:
    """Never 0: the reason is in the document."""
    (found,) = lines(config, "--interval", "0.5")
    (pcpu,) = found.pcpus
    told = os.path.exists("/proc/schedstat")
    assert (pcpu.foreign_switches is not None) is told
    assert ("foreign_switches" in {one.figure for one in found.missing}) is not told


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that everybody may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_without_daemon_and_root_it_says_what_it_may_miss(public: Path) -> None:
    """Only root can verify a VMM by itself."""
    config = public / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {public}\n")
    (found,) = lines(config, "--interval", "0.5")
    assert not found.daemon.running
    assert [one.code for one in found.notes] == ([] if os.geteuid() == 0 else ["not-root"])
    program = (  # once as root, so that another user need not be able to read any module
        "import os, sys; from kata_pin.cli import main\n"
        "main.run(sys.argv[1:])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main.run(sys.argv[1:]))"
    )
    arguments = ["--config", str(config), "top", "--once", "--interval", "0.5"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kata-pin top") == 2
    assert done.stdout.count("without the daemon only root can verify VMM processes") == 1
