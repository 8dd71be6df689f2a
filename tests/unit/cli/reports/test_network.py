"""The network of one sandbox: what is read, what cannot be, and how it reads."""

import json
import os
import re

import pytest

from kata_pin.base.documents.state import Interface, Network, Sandbox, VhostWorker
from kata_pin.base.errors import HostError
from kata_pin.cli.doctor import sandboxes
from kata_pin.cli.reports import words
from kata_pin.cli.reports.activity import read_network, with_network
from kata_pin.linux import network
from kata_pin.linux.files import HOST
from kata_pin.linux.process import read_process
from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, plain

TAP = Interface("tap0_kata", "tap", 2, "eth0", True, (VhostWorker(7, False), VhostWorker(8, False)))


def here(*roles: str, starttime: int | None = None) -> Sandbox:
    """Return a sandbox whose VMM is this very process."""
    born = read_process(HOST, os.getpid()).key.starttime if starttime is None else starttime
    threads = [docs.thread(n, role, "4") for n, role in enumerate(roles)]
    return docs.sandbox("a/b", "4", *threads, vmm=docs.vmm(pid=os.getpid(), starttime=born))


def test_without_a_tap_or_a_vhost_worker_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """netlink is not asked then, and pyroute2 is not imported; nor without a VMM."""
    monkeypatch.setattr(network, "interfaces", lambda *_: pytest.fail("asked"))
    assert read_network(here("emulator")) is None
    assert read_network(docs.lost()) is None


def test_interfaces_are_those_of_the_vmm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document of one sandbox has them; not if the pid is another process's by now."""
    monkeypatch.setattr(network, "interfaces", lambda *_: (TAP,))
    (one,) = with_network(docs.state(here("vhost"))).sandboxes
    assert one.network == Network((TAP,))
    other = read_network(here("vhost", starttime=1))
    assert other == Network(problem=f"VMM process {os.getpid()} has exited")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (HostError("list interfaces of", "process 1", 1, hint="needs CAP_SYS_ADMIN"),
         "cannot list interfaces of process 1: Operation not permitted; needs CAP_SYS_ADMIN"),
        (HostError("list descriptors of", "process 1", 13),
         "cannot list descriptors of process 1: Permission denied; run as root"),
        (HostError("list interfaces of", "process 1", 12),
         "cannot list interfaces of process 1: Cannot allocate memory"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(
    error: HostError, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed, on which process, why, and what helps."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(network, "interfaces", refuse)
    assert read_network(here("vhost")) == Network(problem=text)


@pytest.mark.parametrize(
    ("interface", "text"),
    [
        (TAP, "tap0_kata (tap, 2 queues, peer eth0): vhost 7, 8"),
        (Interface("tap1", "tap", 1, "", True, (VhostWorker(7, True),)),
         "tap1 (tap, 1 queue): vhost 7 (inferred)"),
        (Interface("tap1", "tap", 1, "", True), "tap1 (tap, 1 queue): no vhost worker known"),
        (Interface("eth0", "", 1), "eth0 (device, 1 queue): not open"),
    ],
)  # fmt: skip
def test_an_interface_in_words(interface: Interface, text: str) -> None:
    """Kind, queues, peer, and the threads that serve it."""
    assert words.interface(interface) == text


def test_doctor_names_open_interfaces() -> None:
    """One row per interface that the VMM has open; a problem is a row as well."""
    peer = Interface("eth0", "veth", 1, "tap0_kata")
    (row,) = sandboxes.network(Network((TAP, peer)), "a/b")
    assert (row.check, row.status, row.sandbox) == ("network", "ok", "a/b")
    assert row.text == "tap0_kata (tap, 2 queues, peer eth0): vhost 7, 8"
    (row,) = sandboxes.network(Network(problem="cannot x"), "a/b")
    assert (row.status, row.text) == ("info", "interfaces unknown: cannot x")
    assert list(sandboxes.network(None, "a/b")) == []


def test_only_show_of_one_sandbox_reads_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text and as JSON; the overview and the pCPUs do without."""
    monkeypatch.setattr(network, "interfaces", lambda *_: (TAP,))
    config = str(serve({"state": lambda _: docs.state(here("vhost"))}))
    assert run(["show", "a/b", "--config", config]) == 0
    assert re.search(r"tap0_kata +tap +2 +eth0 +vhost 7, 8", capsys.readouterr().out)
    assert run(["show", "a/b", "--json", "--config", config]) == 0
    (one,) = json.loads(capsys.readouterr().out)["sandboxes"]
    assert one["network"] == plain(Network((TAP,)))
    monkeypatch.setattr(network, "interfaces", lambda *_: pytest.fail("asked"))
    assert run(["show", "--config", config]) == 0
    assert run(["show", "a/b", "--cpus", "--config", config]) == 0
