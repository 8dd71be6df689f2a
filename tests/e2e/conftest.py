"""Tests that run inside a lab machine only (`scripts/lab test`); elsewhere none is collected."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.e2e import diagnosis
from tests.e2e.bystanders import Bystanders, bystanders
from tests.e2e.idlevm import idle_vm
from tests.e2e.katapods import Pods, private_daemon
from tests.e2e.minikata import client
from tests.e2e.node import VARIABLE, Node
from tests.support.daemon import Node as PrivateNode
from tests.support.waiting import wait_for

if VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]

SHIM: Final = Path("/opt/kata/bin/containerd-shim-kata-v2")

_BEGAN = pytest.StashKey[float]()


@pytest.fixture(scope="session")
def node() -> Node:
    """The machine, as the lab promised it."""
    return Node.read()


@pytest.fixture(scope="session", autouse=True)
def _results(node: Node) -> None:
    node.results_folder()


@pytest.fixture(scope="session", autouse=True)
def _installed_shim() -> None:
    """Put the shim's executable where Kata's releases have it: by its path it is taken for one."""
    folder = Path(client.interpreter()).parent
    if not SHIM.exists():
        SHIM.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / SHIM.name, SHIM)
    if not folder.is_symlink():
        shutil.rmtree(folder)
        folder.symlink_to(SHIM.parent)


@pytest.fixture
def start_vm(node: Node) -> Iterator[Callable[..., int]]:
    """Start idle VMs, each with more QEMU arguments; they live until the failure is diagnosed."""
    with ExitStack() as stack:
        yield lambda *more: stack.enter_context(idle_vm(node, *more))


@pytest.fixture(scope="session")
def kvm(node: Node) -> None:
    """Skip where the machine has no KVM inside."""
    if not node.kvm:
        pytest.skip(f"{node.flavour} has no KVM inside")


@pytest.fixture(scope="session")
def _bystanders(node: Node) -> Iterator[Bystanders]:
    with bystanders(node) as made:
        yield made


@pytest.fixture
def untouched(_bystanders: Bystanders) -> Iterator[Bystanders]:
    """Processes that are nobody's sandbox: no test that asks for them may have moved them."""
    _bystanders.look()
    yield _bystanders
    _bystanders.check()


@pytest.fixture(scope="module")
def pinner(node: Node) -> Iterator[PrivateNode]:
    """A daemon on directories of its own, for the tests of one module; it acts on events alone."""
    with private_daemon() as made:
        made.start()
        yield made


@pytest.fixture
def start_pod(node: Node, pinner: PrivateNode) -> Iterator[Pods]:
    """Start sandboxes as Kata does; they live until a failure is diagnosed."""
    with ExitStack() as stack:
        yield Pods(node, pinner, stack)
    wait_for(lambda: not pinner.sandboxes(), "the sandboxes to be forgotten")


@pytest.fixture
def configure(pinner: PrivateNode) -> Iterator[Callable[..., None]]:
    """Change settings of the running daemon, for one test: it reads its configuration anew."""
    before = dict(pinner.settings)

    def change(**settings: object) -> None:
        pinner.configure(**{**before, **settings})
        assert pinner.daemon is not None
        pinner.daemon.reload()
        pinner.ask("reconcile")  # what follows is not the reload's doing

    yield change
    change()


@pytest.fixture
def switch() -> Iterator[Callable[[int, bool], None]]:
    """Take CPUs offline and online; all are online at the end."""
    off: set[int] = set()

    def set_to(cpu: int, on: bool) -> None:
        Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text("1" if on else "0")
        (off.discard if on else off.add)(cpu)

    yield set_to
    for cpu in tuple(off):
        set_to(cpu, True)


@pytest.hookimpl
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when the test began, for its part of the journal."""
    item.stash[_BEGAN] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect a diagnosis at the moment of failure, before fixtures take the scene away."""
    report = yield
    if report.failed:
        text = report.longreprtext
        name = f"{item.name}-{report.when}"
        private = getattr(item, "funcargs", {}).get("pinner")
        diagnosis.collect(Node.read(), name, item.stash[_BEGAN], text, private=private)
    return report
