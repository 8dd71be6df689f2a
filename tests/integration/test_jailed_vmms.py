"""Firecracker in its jail, as real processes: who is believed, and what the daemon does with it.

Firecracker itself is in no registry; tests/support/vmm_standin.py plays it with a real VM, in a
real jail: its own mount namespace, root, program and pid file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kata_pin.base.errors import VmmError
from kata_pin.base.sandbox import Vmm
from kata_pin.base.steps import finish
from kata_pin.rights.calls import DIRECT
from kata_pin.vmm.checks import DEFAULT_EXECUTABLES
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.state_files import KataPaths
from tests.support import real_vmms, stopped, vmm_standin
from tests.support.daemon import Pod, assert_unprivileged, private_node
from tests.support.katalike import KataDirs, KataSandbox
from tests.support.shim_process import ProcessShim
from tests.support.specimen import two_cpus
from tests.support.vmm_standin import Spec, copy_of_python, enter_jail, jailed_pid
from tests.support.vmmhost import SHIMS, live
from tests.support.waiting import wait_for

pytestmark = pytest.mark.root

SANDBOX = f"{os.getpid():032x}".ljust(64, "0")
OTHER = SANDBOX[::-1]
SOMEBODY = 4242
TIMES = ("--start-time-us", "812", "--start-time-cpu-us", "0", "--parent-cpu-time-us", "17")


def _go(dirs: KataDirs, sandbox_id: str = SANDBOX, *, daemonized: bool = True) -> Spec:
    """Return Firecracker as Go's runtime jails it, with two vCPUs of a real VM where KVM is."""
    cut = sandbox_id[:32]
    argv = ("/firecracker", "--id", cut, *TIMES, "--config-file", "/fcConfig.json")
    return Spec(
        copy_of_python(dirs.vc.parent / "bin" / "firecracker"),
        argv,
        ("fc_api", "fc_vcpu 0", "fc_vcpu 1"),
        kvm_ids={"fc_vcpu 0": 0, "fc_vcpu 1": 1} if os.path.exists("/dev/kvm") else {},
        jail=str(dirs.vc / "firecracker" / cut / "root"),
        daemonized=daemonized,
    )


def _finder(dirs: KataDirs) -> VmmFinder:
    allowed = Executables(vmms=DEFAULT_EXECUTABLES, shims=SHIMS)
    paths = KataPaths(str(dirs.vc), str(dirs.kata))
    return VmmFinder(live(), paths=paths, executables=allowed)


def _find(dirs: KataDirs, *hints: int, sandbox_id: str = SANDBOX) -> Vmm:
    return _finder(dirs).find(sandbox_id, dict.fromkeys(hints, 0))


@contextlib.contextmanager
def _shim(dirs: KataDirs) -> Iterator[ProcessShim]:
    shim = ProcessShim(SANDBOX, dirs.bundles)
    try:
        yield shim
    finally:
        shim.stop()


def test_a_jail_is_a_witness(dirs: KataDirs) -> None:
    """A daemonized jailer is gone: no parent, no pid in Kata's files, and a dead one in hooks."""
    spec = _go(dirs)
    with vmm_standin.running(spec) as pid:
        vmm = _find(dirs, 2**22 + 1)
        assert (vmm.kind, vmm.process.pid, vmm.exe) == ("firecracker", pid, "/firecracker")
        assert vmm.witness == f"its root is the sandbox's jail {spec.jail}"
        finder = _finder(dirs)
        assert pid in [one.pid for one in finder.named(SANDBOX, [])]
        (dirs.vc / "sbs" / SANDBOX).mkdir()
        assert finish(finder.sandboxes())[SANDBOX] == pid
        assert SANDBOX[:32] not in finish(finder.sandboxes())


def test_a_jail_is_verified_without_a_broker(dirs: KataDirs) -> None:
    """The process runs the jail's program, in it, and nobody but root may write there."""
    spec = _go(dirs, daemonized=False)
    jail = Path(spec.jail)

    def refused(pid: int, path: Path = jail) -> int | None:
        try:
            DIRECT.verify_jail(pid, str(path))
        except OSError as error:
            return error.errno
        return 0

    with vmm_standin.running(spec) as pid:
        DIRECT.verify_jail(pid, spec.jail)
        assert refused(os.getpid()) == errno.ESTALE
        assert refused(pid, jail.parent) == errno.EINVAL
        assert refused(pid, jail.parent.with_name(OTHER) / "root") == errno.ENOENT
        jail.chmod(0o777)
        assert refused(pid) == errno.EACCES


def test_runtime_rs_jails_under_its_own_folder(dirs: KataDirs) -> None:
    """There the jailer becomes the VMM, a child of the shim, with the whole id."""
    argv = ("/firecracker", "--id", SANDBOX, *TIMES, "--api-sock", "/run//fc.sock")
    jail = dirs.kata / "firecracker" / SANDBOX / "root"
    spec = dataclasses.replace(_go(dirs), argv=argv, jail=str(jail), daemonized=False)
    with _shim(dirs) as shim:
        pid = shim.spawn(spec.command)
        wait_for(lambda: spec.is_ready(pid), "the VMM")
        vmm = _find(dirs)
        assert vmm.process.pid == pid
        assert vmm.witness == f"its parent, the sandbox's shim (pid {shim.pid})"


@pytest.mark.parametrize("runtime", ["go", "rs"])
def test_without_a_jail(dirs: KataDirs, runtime: str) -> None:
    """The socket's path names the sandbox, which Go's runtime cuts."""
    program = copy_of_python(dirs.vc.parent / "bin" / "firecracker")
    home = dirs.vc / "firecracker" / SANDBOX[:32] / "root"
    go = ("--api-sock", f"{home}/run/firecracker.socket", "--config-file", f"{home}/fcConfig.json")
    rs = ("--api-sock", f"{dirs.kata / SANDBOX}/run/fc.sock")
    argv = (program, *(go if runtime == "go" else rs))
    spec = Spec(program, argv, ("fc_api", "fc_vcpu 0"))
    allowed = Executables(vmms=(*DEFAULT_EXECUTABLES, program), shims=SHIMS)
    with _shim(dirs) as shim:
        pid = shim.spawn(spec.command)
        wait_for(lambda: spec.is_ready(pid), "the VMM")
        paths = KataPaths(str(dirs.vc), str(dirs.kata))
        finder = VmmFinder(live(), paths=paths, executables=allowed)
        assert finder.find(SANDBOX).process.pid == pid
        assert finish(finder.sandboxes())[SANDBOX] == pid


@pytest.mark.parametrize("layout", ["go", "rs", "rs, jailed"])
def test_the_real_firecracker(dirs: KataDirs, layout: str) -> None:
    """The layouts in which it is a child of the shim; the fourth: test_other_vmms."""
    if layout == "go":
        command = real_vmms.firecracker_without_jail(dirs.vc, SANDBOX[:32])
    else:
        jailed = layout == "rs, jailed"
        command = real_vmms.firecracker_of_rs(dirs.kata, SANDBOX, jailed=jailed)
    allowed = (*DEFAULT_EXECUTABLES, str(real_vmms.program("firecracker")))
    with _shim(dirs) as shim:
        pid = shim.spawn(command)
        wait_for(lambda: "fc_api" in real_vmms.names(pid), "Firecracker to start")
        finder = VmmFinder(
            live(),
            paths=KataPaths(str(dirs.vc), str(dirs.kata)),
            executables=Executables(vmms=allowed, shims=SHIMS),
        )
        assert finder.find(SANDBOX).process.pid == pid
        assert finish(finder.sandboxes())[SANDBOX] == pid


def test_a_jail_of_another_sandbox(dirs: KataDirs) -> None:
    """A jailed VMM may call itself what it likes: its jail belongs to one sandbox."""
    spec = _go(dirs)
    jail = str(dirs.vc / "firecracker" / OTHER[:32] / "root")
    with (
        vmm_standin.running(dataclasses.replace(spec, jail=jail)) as pid,
        pytest.raises(VmmError, match=r"it runs /firecracker in no jail of the sandbox's"),
    ):
        _find(dirs, pid)
    with vmm_standin.running(dataclasses.replace(spec, jail=jail)) as pid:
        with pytest.raises(VmmError, match=f"its command line names {SANDBOX[:32]}"):
            _find(dirs, pid, sandbox_id=OTHER)
        with vmm_standin.running(spec) as own:
            assert _find(dirs, pid).process.pid == own
            Path(spec.jail, "firecracker").unlink()
            shutil.copy(spec.program, spec.jail)
            with pytest.raises(VmmError, match=r"its root is another folder, or it runs another"):
                _find(dirs)


def test_a_jail_that_others_may_write(dirs: KataDirs) -> None:
    """Whoever may write in the jail, or to its program, could have put anybody there."""
    spec = _go(dirs)
    with vmm_standin.running(spec):
        for part in ("..", "", "firecracker"):
            path = Path(os.path.normpath(f"{spec.jail}/{part}"))
            mode = path.stat().st_mode
            path.chmod(0o777)
            with pytest.raises(VmmError, match="others than root"):
                _find(dirs)
            path.chmod(mode & 0o7777)
        os.chown(spec.jail, SOMEBODY, SOMEBODY)
        with pytest.raises(VmmError, match="others than root may write there"):
            _find(dirs)


def test_a_jail_of_a_strangers_own(dirs: KataDirs) -> None:
    """A jail elsewhere, by all that its user can have, is none, even with a pid file and a hook."""
    spec = _go(dirs)
    own = dirs.vc.parent / "own"
    before = partial(_be_somebody, own, spec.program)
    pid = stopped.start(spec.argv, executable="/firecracker", uid=SOMEBODY, before=before)
    try:
        assert os.readlink(f"/proc/{pid}/exe") == "/firecracker"
        with pytest.raises(VmmError, match="belongs to uid 4242, not to root"):
            _find(dirs, pid)
        jail = Path(spec.jail)
        jail.mkdir(parents=True)
        (jail / "firecracker.pid").write_text(str(pid))
        os.chown(own / "firecracker", 0, 0)
        shutil.copy(spec.program, jail)
        with pytest.raises(VmmError, match="its root is another folder"):
            _find(dirs)
    finally:
        stopped.end([pid])


def _be_somebody(own: Path, program: str) -> None:
    """Enter a jail whose folder and program belong to somebody."""
    enter_jail(own, [(program, "firecracker")])
    for path in ("/", "/firecracker"):
        os.chown(path, SOMEBODY, SOMEBODY)


# ---- the daemon, which has no rights -------------------------------------------------------


def _affinities(pid: int, names: Sequence[str]) -> list[set[int]]:
    """Return where threads may run, by their names."""
    tasks = {p.read_text().strip(): p.parent.name for p in Path(f"/proc/{pid}/task").glob("*/comm")}
    return [os.sched_getaffinity(int(tasks[name])) for name in names]


def test_the_daemon_pins_a_jailed_vmm() -> None:
    """Its broker alone may touch it, and does so after the jail was verified; restarts too.

    Kata before 3.32: hooks and persist.json have the pid of the jailer, which has ended.
    """
    first, second = two_cpus()
    with private_node() as node, contextlib.ExitStack() as closing:
        name = "fc".ljust(40, "x")
        pod = Pod(node, KataSandbox(node.dirs, node.id_of(name)))
        spec = _go(node.dirs, pod.id)
        shim = ProcessShim(pod.id, node.dirs.bundles)
        closing.callback(shim.stop)
        jailer = shim.spawn(spec.command)
        pid = wait_for(lambda: jailed_pid(spec), "the pid file")
        closing.callback(os.kill, pid, 9)
        wait_for(lambda: spec.is_ready(pid), "the VMM")
        pod.kata.pid = jailer
        daemon = node.start()
        assert_unprivileged(daemon.pid)
        for container, cpus in ((pod.id, None), ("c1", f"{first},{second}")):
            pod.write_bundle(
                container, cpus, kind="container" if cpus else "sandbox", exclusive=bool(cpus)
            )
            pod.persist(container, cpus, exclusive=bool(cpus))
            run = node.hook("createRuntime", container, jailer)
            assert run.status == 0
        vcpus = ("fc_vcpu 0", "fc_vcpu 1")
        wait_for(lambda: _affinities(pid, vcpus) == [{first}, {second}], "pins")
        shown = node.sandboxes()
        assert list(shown) == [name], "no second sandbox under half of the id"
        vmm = shown[name]["vmm"]
        assert (vmm["kind"], vmm["pid"], vmm["orphan"]) == ("firecracker", pid, False)
        assert vmm["confirmed_by"] == f"its root is the sandbox's jail {spec.jail}"
        daemon.kill()
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(tid), {first, second})
        node.start()
        wait_for(lambda: _affinities(pid, vcpus) == [{first}, {second}], "pins after a restart")
        assert list(node.sandboxes()) == [name]
