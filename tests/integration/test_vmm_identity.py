"""Processes that others run cannot take a VMM's place, whatever they can arrange (D24)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kata_pin.base.errors import VmmError
from kata_pin.base.sandbox import Vmm
from kata_pin.vmm.claims import Accepted, Shims, Strength
from kata_pin.vmm.find import Executables, VmmFinder
from kata_pin.vmm.state_files import KataPaths
from tests.support.daemon import Node
from tests.support.katalike import KataDirs, KataSandbox
from tests.support.qemu import QEMU, Accelerator, Machine
from tests.support.vmmhost import EXECUTABLES, SHIMS, live, lookalike
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

P1 = f"i{os.getpid()}"
SOMEBODY = 4242
AS_SOMEBODY = ("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups")
CGROUPS = Path("/sys/fs/cgroup")
HIERARCHY = next((p for p in (CGROUPS / "cpuset", CGROUPS) if p.is_dir()), CGROUPS)


def _find(
    dirs: KataDirs, name: str = P1, *hints: int, vmms: Sequence[str] = (),
    shims: Sequence[str] = (), before: Accepted | None = None,
) -> Vmm:  # fmt: skip
    finder = VmmFinder(
        live(),
        paths=KataPaths(str(dirs.vc), str(dirs.kata)),
        executables=Executables(vmms=(QEMU, *vmms), shims=(*SHIMS, *shims)),
        before=lambda _: before,
    )
    return finder.find(name, dict.fromkeys(hints, 0))


def _vmm_argv(name: str) -> list[str]:
    """Return a real QEMU that names a sandbox and does nothing."""
    idle = ["-S", "-M", "none", "-nodefaults", "-display", "none", "-monitor", "none"]
    return [QEMU, "-name", f"sandbox-{name}", *idle, "-serial", "none"]


def _is_qemu(pid: int) -> bool:
    """Whether a process has executed QEMU and shows its arguments, which come a little later."""
    shows = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(QEMU.encode())
    return shows and os.readlink(f"/proc/{pid}/exe") == os.path.realpath(QEMU)


@contextlib.contextmanager
def claiming(
    name: str, *, prefix: Sequence[str] = AS_SOMEBODY, cgroup: Path | None = None
) -> Iterator[int]:
    """Run the real QEMU as another user, or behind another prefix; yield its pid."""
    with subprocess.Popen([*prefix, *_vmm_argv(name)], stdin=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: _is_qemu(process.pid), "exec of QEMU")
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text(str(process.pid))
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def cgroup_named(path: str, *, delegated: str = "") -> Iterator[Path]:
    """Make a cgroup; the part `delegated` of its path belongs to somebody."""
    made: list[Path] = []
    here = HIERARCHY
    try:
        for part in path.split("/"):
            here = here / part
            here.mkdir()
            made.append(here)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (here / file).exists() and not (here / file).read_text().strip():
                    (here / file).write_text((here.parent / file).read_text())
        if delegated:
            owned = HIERARCHY / delegated
            for each in (owned, *(owned / n for n in ("cgroup.procs", "tasks"))):
                if each.exists():
                    os.chown(each, SOMEBODY, SOMEBODY)
        yield here
    finally:
        for each in reversed(made):
            wait_for(partial(_removed, each), f"{each} to be empty")


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


# ---- cgroups -----------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["the cgroup", "one above it"])
def test_a_delegated_cgroup_is_no_witness(dirs: KataDirs, who: str) -> None:
    """A cgroup that bears the sandbox's name proves nothing if somebody else may fill it."""
    top = f"kp-{P1}"
    path = f"{top}/kata_{P1}"
    delegated = path if who == "the cgroup" else top
    root = ("env",)
    with cgroup_named(path, delegated=delegated) as cgroup:
        with (
            claiming(P1, prefix=root, cgroup=cgroup) as pid,
            pytest.raises(VmmError, match=rf"pid {pid} .*belongs to uid {SOMEBODY}"),
        ):
            _find(dirs)
        with claiming(P1, cgroup=cgroup), pytest.raises(VmmError, match="not run as root"):
            _find(dirs)


def test_a_cgroup_confirms_only_what_root_runs(dirs: KataDirs) -> None:
    """Root's own cgroup confirms a process of root's, and none that dropped its rights."""
    with cgroup_named(f"kata_{P1}") as cgroup:
        with claiming(P1, prefix=("env",), cgroup=cgroup) as pid:
            vmm = _find(dirs)
            assert (vmm.process.pid, vmm.strength) == (pid, Strength.CGROUP)
        with claiming(P1, cgroup=cgroup) as pid:
            with pytest.raises(VmmError):
                _find(dirs)
            assert _find(dirs, P1, pid).strength is Strength.HOOK


def test_files_that_others_may_write_in_a_cgroup(dirs: KataDirs) -> None:
    """Write rights on cgroup.procs alone are enough to move a process in."""
    with cgroup_named(f"kata_{P1}") as cgroup, claiming(P1, prefix=("env",), cgroup=cgroup):
        (cgroup / "cgroup.procs").chmod(0o666)
        with pytest.raises(VmmError, match="can be written by others"):
            _find(dirs)


# ---- shims -------------------------------------------------------------------------------

_SHIM = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1].split("|"), stdin=subprocess.DEVNULL)
print(process.pid, flush=True)
sys.stdin.read()
process.kill()
"""


@contextlib.contextmanager
def parent_of_qemu(
    name: str, program: str, prefix: Sequence[str] = (), child: Sequence[str] = ()
) -> Iterator[int]:
    """Run a program with `-id NAME` as the parent of a real QEMU; yield QEMU's pid."""
    argv = [*prefix, program, "-c", _SHIM, "|".join([*child, *_vmm_argv(name)]), "-id", name]
    env = {**os.environ, "PYTHONHOME": sys.base_prefix}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            pid = int(process.stdout.readline())
            wait_for(lambda: _is_qemu(pid), "exec of QEMU")
            yield pid
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()


def _copy_of_python(dirs: KataDirs, name: str, mode: int = 0o755) -> str:
    path = shutil.copy(os.path.realpath(sys.executable), dirs.vc / name)
    for folder in (dirs.vc, *dirs.vc.parents[:2]):
        folder.chmod(0o755)
    os.chmod(path, mode)
    return str(path)


def test_a_setuid_parent_is_no_shim(dirs: KataDirs) -> None:
    """A program that makes its caller root by its effective uid alone was started by somebody."""
    program = _copy_of_python(dirs, "containerd-shim-kata-v2", 0o755 | stat.S_ISUID)
    child = ("setpriv", f"--reuid={SOMEBODY}", "--clear-groups")
    with parent_of_qemu(P1, program, AS_SOMEBODY, child) as pid:
        parent = live().read_process(pid).ppid
        shims = Shims(live(), (*SHIMS, program))
        assert shims.why_not(parent, P1) == "it does not run as root"
        with pytest.raises(VmmError, match="no VMM found"):  # strangers' claims are not looked at
            _find(dirs, shims=(program,))
    program = _copy_of_python(dirs, "containerd-shim-kata-v3")
    with parent_of_qemu(P1, program, (), child) as pid:
        vmm = _find(dirs, shims=(program,))
        assert (vmm.process.pid, vmm.strength) == (pid, Strength.SHIM)


def test_a_parent_that_runs_another_program_is_no_shim(dirs: KataDirs) -> None:
    """Root runs much with arguments that others give; only Kata's own executable is its shim."""
    program = _copy_of_python(dirs, "anything")
    with (
        parent_of_qemu(P1, program) as pid,
        pytest.raises(VmmError, match=rf"pid {pid} .*not on the allow-list \(`shims`\)"),
    ):
        _find(dirs)
    os.chown(program, SOMEBODY, SOMEBODY)
    with (
        parent_of_qemu(P1, program),
        pytest.raises(VmmError, match=f"belongs to uid {SOMEBODY}, not to root"),
    ):
        _find(dirs, shims=(program,))


# ---- executables -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "mode", "why"),
    [
        (SOMEBODY, 0o755, f"belongs to uid {SOMEBODY}"),
        (0, 0o777, "can be written by others"),
    ],
)
def test_whose_executables_are_believed(
    dirs: KataDirs, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, why: str
) -> None:
    """Neither a path on the list nor having been deleted makes somebody's own file a VMM."""
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    program = _copy_of_python(dirs, "qemu-system-own", mode)
    os.chown(program, owner, owner)
    os.chmod(program, mode)
    with lookalike("-name", f"sandbox-{P1}", executable=program) as process:
        with pytest.raises(VmmError, match=why):
            _find(dirs, P1, process.pid, vmms=(program,))
        Path(program).unlink()
        with pytest.raises(VmmError, match=why):
            _find(dirs, P1, process.pid, vmms=(program,))


def test_a_user_namespace_proves_nothing_about_paths(dirs: KataDirs) -> None:
    """Who makes one may mount root's own Python over QEMU, and have it deleted."""
    mounts = f"mount --bind {os.path.realpath(sys.executable)} {QEMU}"
    prefix = ("unshare", "-U", "-r", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh")
    with (
        lookalike("-name", f"sandbox-{P1}", executable=QEMU, prefix=prefix) as process,
        pytest.raises(VmmError, match="its own user namespace"),
    ):
        _find(dirs, P1, process.pid)


# ---- several claims ----------------------------------------------------------------------


def _sandbox(dirs: KataDirs, **options: object) -> KataSandbox:
    machine = Machine(boot=1, maximum=2)
    return dataclasses.replace(
        KataSandbox(dirs, P1, accelerator=Accelerator.TCG, machine=machine),
        **options,  # type: ignore[arg-type]
    )


def test_the_stronger_witness_wins(dirs: KataDirs) -> None:
    """A hook's pid, then the shim's child, then root's file, then the cgroup; losers are shown."""
    with (
        _sandbox(dirs) as kata,
        cgroup_named(f"kata_{P1}") as cgroup,
        claiming(P1, prefix=("env",), cgroup=cgroup) as other,
    ):
        vmm = _find(dirs)
        assert (vmm.process.pid, vmm.strength) == (kata.pid, Strength.SHIM)
        assert f"pid {other}: confirmed only by cgroup" in vmm.refused[0]
        vmm = _find(dirs, P1, other)
        assert (vmm.process.pid, vmm.strength) == (other, Strength.HOOK)


def test_two_equal_claims_are_both_refused(dirs: KataDirs) -> None:
    """Of two processes with the same evidence neither is believed, but the one known before."""
    with claiming(P1) as one, claiming(P1) as two:
        with pytest.raises(VmmError, match="2 processes are confirmed equally") as refused:
            _find(dirs, P1, one, two)
        assert f"pid {one}: pid from a hook" in str(refused.value)
        known = live().read_process(one).key
        vmm = _find(dirs, P1, one, two, before=Accepted(known, Strength.HOOK))
        assert vmm.process.pid == one


def test_a_dead_vmm_is_not_replaced_by_less(dirs: KataDirs) -> None:
    """What takes the place of a VMM that died needs evidence as strong, and not by the pid."""
    with claiming(P1) as pid:
        key = live().read_process(pid).key
        earlier = Accepted(key._replace(pid=1), Strength.HOOK)
        with _sandbox(dirs, shim_process=False) as kata:
            with pytest.raises(VmmError, match="was confirmed by more"):
                _find(dirs, before=earlier)
            assert _find(dirs, P1, kata.pid, before=earlier).process.pid == kata.pid
        reused = Accepted(key._replace(starttime=1), Strength.HOOK)
        with pytest.raises(VmmError, match="the pid in a hook was an earlier process's"):
            _find(dirs, P1, pid, before=reused)


def test_a_hook_does_not_speak_for_a_later_process(dirs: KataDirs) -> None:
    """The pid in a message is that of a process which ran when it was sent."""
    sent_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    time.sleep(0.05)
    with claiming(P1) as pid:
        finder = VmmFinder(live(), executables=EXECUTABLES)
        with pytest.raises(VmmError, match="the pid in a hook was an earlier process's"):
            finder.find(P1, {pid: sent_ns})
        assert not finder.is_claimed(P1, {pid: sent_ns})
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        assert finder.find(P1, {pid: now_ns}).process.pid == pid


def test_a_file_does_not_speak_for_a_later_process(dirs: KataDirs) -> None:
    """A pid file that a VMM left names a number; another process has it since the VMM died."""
    with claiming(P1) as pid:
        folder = dirs.vc / "vm" / P1
        folder.mkdir(parents=True)
        (folder / "pid").write_text(f"{pid}\n")
        key = live().read_process(pid).key
        assert _find(dirs, before=Accepted(key, Strength.FILE)).process == key
        died = Accepted(key._replace(starttime=1), Strength.FILE)
        with pytest.raises(VmmError, match="the pid in pid file was an earlier process's"):
            _find(dirs, before=died)


@pytest.mark.parametrize("witness", ["hook", "shim", "file"])
def test_a_vmm_without_roots_rights(dirs: KataDirs, witness: str) -> None:
    """Kata's rootless mode runs QEMU as another user: what names the process confirms it."""
    if witness == "shim":
        program = _copy_of_python(dirs, "containerd-shim-kata-v2")
        with parent_of_qemu(P1, program, (), AS_SOMEBODY) as pid:
            assert _find(dirs, shims=(program,)).process.pid == pid
        return
    with claiming(P1) as pid:
        if witness == "hook":
            assert _find(dirs, P1, pid).process.pid == pid
        else:
            folder = dirs.vc / "vm" / P1
            folder.mkdir(parents=True)
            (folder / "pid").write_text(f"{pid}\n")
            assert _find(dirs).witness == "pid in pid file"


# ---- in the daemon -----------------------------------------------------------------------

TRIES = 100
"""Impostors per way in the suite; scripts/chaos makes 10,000 in all."""


@pytest.mark.parametrize("confined", [False, True])
def test_a_template_vm_is_no_pods(node: Node, *, confined: bool) -> None:
    """runtime-rs' factory runs a VM under an id that no pod has, from a program that is no shim.

    It has a folder of Kata's, and with sandbox_cgroup_only a cgroup that holds its id. Its threads
    are left where they are, while a pod's VM beside it, made of the template, is placed before it
    has run: its shim starts it as any other, to load a state.
    """
    template = str(uuid.uuid4())
    narrow = frozenset({0})
    (node.dirs.kata / template).mkdir()
    with contextlib.ExitStack() as stack:
        path = f"kata_sandboxed_pod/{template}" if confined else "kata_sandboxed_pod/other"
        group = stack.enter_context(cgroup_named(path))
        vm = stack.enter_context(claiming(template, prefix=("taskset", "-c", "0"), cgroup=group))
        node.start()
        loading = Machine(boot=1, maximum=1, extra=("-incoming", "defer"))
        with node.pod("p1", machine=loading) as pod:
            pod.create("c1", "1")
            pod.wait_placed({1})
            node.ask("reconcile")
            shown = {one["id"]: one for one in node.ask("state")["sandboxes"]}
            assert {one for one, row in shown.items() if row["mask"]} == {pod.id}
            assert (template in shown) is confined, "its cgroup is a witness"
        assert {frozenset(os.sched_getaffinity(tid)) for tid in _threads(vm)} == {narrow}


@pytest.mark.parametrize("cached", [False, True])
def test_a_vm_of_gos_factory_is_its_pods(node: Node, *, cached: bool) -> None:
    """The Go runtime names it by a UUID, and Kata's state of the pod has that name.

    From a template the pod's shim starts it, from the cache the factory's server did. One that
    waits in the cache for its pod has Kata's pid file too. It is left where it is, and so is a
    process that took the name.
    """
    waiting, made = str(uuid.uuid4()), str(uuid.uuid4())
    small, narrow = Machine(boot=1, maximum=1), ("taskset", "-c", "0")
    node.start()
    with (
        claiming(waiting, prefix=narrow) as other,
        claiming(made, prefix=narrow) as impostor,
        node.pod(
            "p1", factory_vm=made, shim_process=not cached, machine=small, booting=True
        ) as pod,
    ):
        folder = node.dirs.vc / "vm" / waiting
        folder.mkdir()
        (folder / "pid").write_text(f"{other}\n")
        node.ask("reconcile")
        assert not {waiting, made} & {one["id"] for one in node.ask("state")["sandboxes"]}
        pod.persist("c1", "1")  # Kata's state alone says whose it is
        pod.wait_placed({1})
        node.ask("reconcile")
        shown = {one["id"]: one["vmm"] for one in node.ask("state")["sandboxes"]}
        assert shown[pod.id]["pid"] == pod.kata.pid
        assert (shown[pod.id]["confirmed_by"] == "pid in persist.json") is cached
        assert not {waiting, made} & shown.keys()
        left = [os.sched_getaffinity(tid) for pid in (other, impostor) for tid in _threads(pid)]
        assert all(cpus == {0} for cpus in left)


def test_impostors_of_a_sandbox_that_lives_and_dies(node: Node) -> None:
    """None of many gets a sandbox's pins, nor its name after its end, nor after a restart."""
    daemon = node.start()
    name = node.id_of("p1")
    path = f"kp-{name}/kata_{name}"
    with cgroup_named(path, delegated=f"kp-{name}") as cgroup, contextlib.ExitStack() as stack:
        everywhere = os.sched_getaffinity(0)
        fakes = [stack.enter_context(claiming(name, cgroup=cgroup)) for _ in range(4)]
        with node.pod("p1", machine=Machine(boot=1, maximum=1)) as pod:
            for file in (pod.kata.persist_path, pod.kata.pidfile):
                file.unlink()
            pod.write_bundle("c1", "1")
            for number in range(TRIES // 20):
                pod.node.hook("createRuntime", "c1", pod.kata.shim.pid, state_id=pod.id)
                shown = node.sandboxes()["p1"]
                assert shown["vmm"]["pid"] == pod.kata.pid, number
            pod.wait_placed({1})
        wait_for(lambda: "p1" not in node.sandboxes(), "the sandbox's end")
        for _ in range(2):
            for _ in range(TRIES // 50):
                node.ask("reconcile")
            assert node.sandboxes().get("p1", {"vmm": None})["vmm"] is None
            assert all(os.sched_getaffinity(pid) == everywhere for pid in fakes)
            daemon.kill()
            daemon = node.start()
