"""Flavours, recipes and the bookkeeping of machines, without booting one."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import cli, process, wheels
from tests.lab.errors import LabError
from tests.lab.flavours import FLAVOURS, SUITES, flavour
from tests.lab.image import Builder, Image
from tests.lab.machine import Machine
from tests.lab.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with a cache of its own."""
    return Settings(cache=tmp_path / "cache", mirror="", accel="tcg", scale=1)


@pytest.fixture
def machine(settings: Settings) -> Machine:
    """A machine that never ran."""
    return Machine(settings, flavour("trixie-kvm"), lambda _: None)


def _pretend(machine: Machine, pid: int, started: int) -> None:
    machine.folder.mkdir(parents=True)
    about = {"flavour": "trixie-kvm", "pid": pid, "started": started}
    about |= {"accel": "tcg", "scale": 10.0, "image": "trixie-0"}
    (machine.folder / "machine.json").write_text(json.dumps(about))


def test_an_unknown_flavour_names_the_known() -> None:
    """A typing error is answered with the list."""
    with pytest.raises(LabError, match="there are: trixie-kvm, trixie-smt, bookworm-kvm"):
        flavour("trixy")


@pytest.mark.parametrize("name", FLAVOURS)
def test_every_flavour_has_sixteen_cpus_on_two_nodes(name: str) -> None:
    """sockets x cores x threads is 16, and the nodes share the CPUs out."""
    arguments = flavour(name).cpu_arguments("tcg")
    smp = dict(word.split("=") for word in arguments[3].split(",")[1:])
    assert int(smp["sockets"]) * int(smp["cores"]) * int(smp["threads"]) == 16
    nodes = [word.rpartition("cpus=")[2] for word in arguments if word.startswith("node,")]
    assert nodes == ["0-7", "8-15"]


def test_machines_have_no_network_and_listen_on_files_only(machine: Machine) -> None:
    """A NIC has no peer, and listeners are unix sockets in the machine's folder."""
    words = machine.arguments(Image(Path("/image")), "tcg")
    listening = ("netdev", "-nic", "tcp", "vnc")
    assert not [word for word in words if any(one in word for one in listening)]
    listeners = [word for word in words if "server=on" in word]
    assert listeners
    assert all("path=" in word or word.startswith("unix:") for word in listeners)


def test_debian_13s_qemu_emulates_where_it_is_chosen(settings: Settings, machine: Machine) -> None:
    """It must have been built; KVM never needs another one."""
    image = Image(Path("/image"))
    assert machine.arguments(image, "tcg")[0] == "qemu-system-x86_64"
    chosen = dataclasses.replace(settings, qemu="trixie")
    machine = Machine(chosen, machine.flavour, print)
    with pytest.raises(LabError, match="Debian 13's QEMU"):
        machine.arguments(image, "tcg")
    root = settings.cache / f"base/trixie-{Builder(chosen, SUITES['trixie'], print).base_key()}"
    (root / "tree").mkdir(parents=True)
    words = machine.arguments(image, "tcg")
    assert words[3] == str(root / "tree/usr/bin/qemu-system-x86_64")
    assert words[words.index("-L") + 1].startswith(str(root))
    assert machine.arguments(image, "kvm")[0] == "qemu-system-x86_64"


def test_a_process_that_took_the_number_is_not_our_machine(machine: Machine) -> None:
    """A pid file with another start time means stopped, and stop ends nobody."""
    child = subprocess.Popen(["sleep", "300"])
    try:
        _pretend(machine, child.pid, process.start_time(child.pid) + 1)
        assert machine.running() is None
        assert not machine.stop()
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_stop_ends_the_machine_even_if_it_ignores_sigterm(machine: Machine) -> None:
    """The process with the recorded pid and start time is gone after stop."""
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    started = process.start_time(child.pid)
    _pretend(machine, child.pid, started)
    assert machine.running()
    process.end_process(child.pid, started, patience_s=0.2)
    assert child.wait(timeout=5) == -signal.SIGKILL
    child.stdout.close()
    assert machine.running() is None


def test_commands_on_a_stopped_machine_say_how_to_start_it(machine: Machine) -> None:
    """The error names the command that helps."""
    with pytest.raises(LabError, match=r"not running .scripts/lab boot trixie-kvm"):
        machine.connect()


def test_a_failed_command_leaves_no_process(tmp_path: Path) -> None:
    """A deadline ends the command and what it started."""
    log = tmp_path / "log"
    with pytest.raises(LabError, match="took over 1 s"):
        process.run(["sh", "-c", "sleep 300 & echo $!; wait"], deadline_s=0.8, log=log)
    pid = int(log.read_text().splitlines()[-1])
    limit = time.monotonic() + 5
    while process.start_time(pid):
        assert time.monotonic() < limit, "still alive after its command ended"
        time.sleep(0.01)


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """The error carries what the command said."""
    with pytest.raises(LabError, match=r"sh failed with 3.*\n.*\nno luck"):
        process.run(["sh", "-c", "echo no luck; exit 3"], deadline_s=10, log=tmp_path / "log")


def test_releases_have_recipes_of_their_own(settings: Settings) -> None:
    """The hash differs between releases and stays when nothing changed."""
    keys = [Builder(settings, suite, print).image_key() for suite in SUITES.values()]
    assert len(set(keys)) == len(keys)
    assert keys[0] == Builder(settings, SUITES["trixie"], print).image_key()


def test_the_guest_gets_locked_wheels_only() -> None:
    """Runtime and test wheels go in, each with its hashes; checkers stay out."""
    lock = wheels.guest_lock()
    names = [line.partition("==")[0] for line in lock.splitlines() if "==" in line]
    assert {"click", "protobuf", "psutil", "pytest"} <= set(names)
    assert not set(names) & wheels.HOST_ONLY
    assert lock.count("--hash=") >= len(names)


def test_the_flavour_may_be_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`run uname` asks for the default machine, `run bookworm-v1 uname` for that one."""
    monkeypatch.setenv("KATA_PIN_LAB_CACHE", str(tmp_path))
    assert cli.main(["run", "uname"]) == 1
    assert "trixie-kvm is not running" in capsys.readouterr().err
    assert cli.main(["run", "bookworm-v1", "uname"]) == 1
    assert "bookworm-v1 is not running" in capsys.readouterr().err
    assert cli.main(["stop", "trixie-smt"]) == 0
    assert "was not running" in capsys.readouterr().err
