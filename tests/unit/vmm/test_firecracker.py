"""Firecracker as both of Kata's runtimes start it, with and without its jailer.

Command lines, folders and ids as Kata 3.21 to 3.32 have them: virtcontainers/fc.go, and
runtime-rs' hypervisor/src/firecracker. Real processes in real jails: tests/integration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kata_pin.base.errors import VmmError
from kata_pin.base.steps import finish
from kata_pin.vmm.find import VmmFinder
from tests.support.hosttree import FakeHost
from tests.support.vmmhost import facts

SANDBOX = "0123456789abcdef" * 4
CUT = SANDBOX[:32]
PID, SHIM, JAILER = 300, 200, 250
SHIM_EXE = "/opt/kata/bin/containerd-shim-kata-v2"


@dataclass(frozen=True)
class Layout:
    """How one of Kata's runtimes starts Firecracker; `base` is where its jail is, if it has one.

    `daemonized`: the jailer ended after it had started the VMM.
    """

    exe: str
    argv: Sequence[str]
    base: str = ""
    cut: bool = False
    daemonized: bool = False


TIMES = ("--start-time-us", "81234", "--start-time-cpu-us", "0", "--parent-cpu-time-us", "1734")
GO_JAIL = ("/firecracker", "--id", CUT, *TIMES, "--config-file", "/fcConfig.json")
HOME = f"/run/vc/firecracker/{CUT}/root"

LAYOUTS = {
    "go": Layout(
        "/opt/kata/bin/firecracker",
        (
            *("/opt/kata/bin/firecracker", "--api-sock", f"{HOME}/run/firecracker.socket"),
            *("--config-file", f"{HOME}/fcConfig.json"),
        ),
        cut=True,
    ),
    "go, jailed": Layout("/firecracker", GO_JAIL, "/run/vc", cut=True),
    "go, jailed, before 3.32": Layout(
        "/firecracker", GO_JAIL, "/run/vc", cut=True, daemonized=True
    ),
    "rs": Layout(
        "/opt/kata/bin/firecracker",
        ("/opt/kata/bin/firecracker", "--api-sock", f"/run/kata/{SANDBOX}/run/fc.sock"),
    ),
    "rs, jailed": Layout(
        "/firecracker",
        ("/firecracker", "--id", SANDBOX, *TIMES, "--api-sock", "/run//fc.sock"),
        "/run/kata",
    ),
}


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Layout:
    """Return each layout in turn."""
    found: Layout = request.param
    return found


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host without processes."""
    return FakeHost(tmp_path)


def _process(host: FakeHost, pid: int, ppid: int, exe: str, argv: Sequence[str]) -> None:
    if (host.folder / "proc" / str(pid)).exists():
        host.end(pid)
    host.process(pid, ppid=ppid, comm=Path(exe).name[:15], starttime=50)
    home = host.folder / "proc" / str(pid)
    (home / "exe").unlink()
    (home / "exe").symlink_to(exe)
    (home / "cmdline").write_bytes("".join(f"{arg}\0" for arg in argv).encode())
    (home / "status").write_text(f"Tgid:\t{pid}\nUid:\t0\t0\t0\t0\n")


def _start(host: FakeHost, layout: Layout, sandbox_id: str = SANDBOX) -> None:
    """Make the processes and files that Kata makes; what only a later version has is left out."""
    shim = ["containerd-shim-kata-v2", "-namespace", "k8s.io", "-id", sandbox_id]
    _process(host, SHIM, 1, SHIM_EXE, shim)
    _process(host, PID, 1 if layout.daemonized else SHIM, layout.exe, layout.argv)
    if layout.base:
        jail = host.folder / layout.base.strip("/") / "firecracker"
        jail = jail / (CUT if layout.cut else sandbox_id) / "root"
        jail.mkdir(parents=True)
        if layout.daemonized:
            (jail / "firecracker.pid").write_text(str(PID))
            persist = host.folder / "run/vc/sbs" / sandbox_id / "persist.json"
            persist.parent.mkdir(parents=True)
            persist.write_text(json.dumps({"HypervisorState": {"Pid": JAILER}}))


def test_each_layout_is_found(layout: Layout, host: FakeHost) -> None:
    """By the scan, and with the hook's pid, which is the jailer's where that has ended."""
    _start(host, layout)
    vmm = VmmFinder(facts(host.root)).find(SANDBOX, {JAILER: 0} if layout.daemonized else {})
    assert (vmm.kind, vmm.process.pid, vmm.orphan) == ("firecracker", PID, False)
    jail = f"its root is the sandbox's jail {HOME}"
    assert vmm.witness == (
        jail if layout.daemonized else f"its parent, the sandbox's shim (pid {SHIM})"
    )


def test_adopted_under_the_whole_id(layout: Layout, host: FakeHost) -> None:
    """Go's runtime gives Firecracker half of the sandbox's id; there is one sandbox all the same.

    A sandbox that is known already is not found a second time.
    """
    _start(host, layout)
    finder = VmmFinder(facts(host.root))
    assert finish(finder.sandboxes()) == {SANDBOX: PID}
    key = finder.find(SANDBOX).process
    assert finish(finder.sandboxes({SANDBOX: key})) == {SANDBOX: PID}


def test_its_jails_pid_file_names_it(host: FakeHost) -> None:
    """The passes' survey reads that process first; the pids of Kata are a dead jailer's."""
    _start(host, LAYOUTS["go, jailed, before 3.32"])
    finder = VmmFinder(facts(host.root))
    assert [one.pid for one in finder.named(SANDBOX, [JAILER])] == [PID]
    assert finder.is_claimed(SANDBOX, {JAILER: 0})


def test_a_pid_file_in_a_jail_proves_nothing(host: FakeHost) -> None:
    """A VMM may write any pid into its jail; that one has to be in the jail itself."""
    layout = LAYOUTS["go"]
    _start(host, layout)
    _process(host, PID, 1, layout.exe, layout.argv)
    jail = host.folder / HOME.strip("/")
    jail.mkdir(parents=True)
    (jail / "firecracker.pid").write_text(str(PID))
    with pytest.raises(VmmError, match=rf"pid {PID} \(pid file in the jail\): no cgroup, parent"):
        VmmFinder(facts(host.root)).find(SANDBOX)


def test_no_jail_of_the_sandbox(host: FakeHost) -> None:
    """A program called /firecracker that is in no jail of the sandbox's is refused."""
    _process(host, PID, 1, "/firecracker", GO_JAIL)
    with pytest.raises(VmmError, match=r"it runs /firecracker in no jail of the sandbox's"):
        VmmFinder(facts(host.root)).find(SANDBOX, {PID: 0})


def test_half_an_id_that_nobody_completes(host: FakeHost) -> None:
    """Without a shim or a file of Kata no sandbox is known, and none is made of half an id."""
    _start(host, LAYOUTS["go, jailed"])
    host.end(SHIM)
    finder = VmmFinder(facts(host.root))
    assert finish(finder.sandboxes()) == {}
    state = host.folder / "run/vc/sbs" / SANDBOX
    state.mkdir(parents=True)
    assert finish(finder.sandboxes()) == {SANDBOX: PID}
