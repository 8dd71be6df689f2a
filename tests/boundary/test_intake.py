"""What makes a pass due: hooks and their spool, Kata's and the kubelet's files, process events.

Threads are those of a tree of /proc on 16 CPUs; a pass is seen by the affinities that it sets.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node

ALL = "0-15"
AUDIT = {"affinity_s": 600, "deep_s": 3600}
"""So rare that on a busy machine no audit finds what its test expects an event to show."""
LONG_AGO = 1_000_000_000


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path, audit=AUDIT) as one:
        yield one


@pytest.fixture
async def vm(node: Node) -> Vm:
    """Return a sandbox with a container on CPU 4."""
    vm = node.vm("p1")
    await node.create(vm, vm.id)
    await node.create(vm, "c1", "4")
    return vm


async def _counting(node: Node, vm: Vm) -> set[str]:
    """Return the containers that count for the sandbox's mask."""
    states = {one["id"]: one["state"] for one in (await node.shown(vm))["containers"]}
    return {name for name, state in states.items() if state in {"created", "running"}}


async def _repaired(node: Node, vm: Vm, cause: Callable[[], object], *, back: str = "4") -> None:
    """Have a thread moved away without an event: a pass after `cause` moves it back."""
    node.host.affinities[vm.iothread] = {9}
    cause()
    await node.placed(vm, io=back)


async def _not_repaired(node: Node, vm: Vm, cause: Callable[[], object]) -> None:
    node.host.affinities[vm.iothread] = {9}
    cause()
    for _ in range(10):
        await node.pause()
    assert vm.masks["io"] == "9"
    await node.ask("reconcile")


# ---- hooks ----------------------------------------------------------------------------------


async def test_pinned_is_only_said_of_pins(node: Node) -> None:
    """A hook is told each reason why pins are not set; nothing where they are, or none are due."""
    vm = node.vm("p1")
    node.kernel.refuse[vm.iothread] = errno.EPERM
    assert "not every thread" in await node.create(vm, "c1", "4")
    node.kernel.refuse.clear()
    for phase in ("poststart", "createRuntime"):
        assert await node.hook(phase, "c1", vm.pid) == ""
    node.change(mode="observe")
    await node.ask("reload")
    assert "only observes" in await node.hook("createRuntime", "c1", vm.pid)
    await node.ask("unpin", sandbox=vm.id)
    assert "released" in await node.hook("createRuntime", "c1", vm.pid)


async def test_what_cannot_be_stored_is_spooled(node: Node, vm: Vm) -> None:
    """Neither lost nor acknowledged: the message stays until it can be recorded."""
    vm.bundle("c2", "5")
    with node.registry_refuses():
        await node.hook("createRuntime", "c2", vm.pid)
        await node.clock.move(3601)
        (spooled,) = (node.runtime_dir / "spool").glob("*.msg")
        assert "c2" not in await _counting(node, vm)
    await node.clock.move(3601)
    await node.placed(vm, main="4-5")
    assert not spooled.exists()


async def test_spooled_messages_count_in_their_order(node: Node, vm: Vm) -> None:
    """By their time, however they came; one whose bundle cannot be read now keeps back no other."""
    await node.stop()
    for name, cpus in (("c2", "5"), ("c3", "6")):
        vm.bundle(name, cpus)
        await node.hook("createRuntime", name, vm.pid)
    await node.hook("poststop", "c3", vm.shim, state_id=vm.id)
    node.kernel.unreadable["c2/config.json"] = errno.EIO
    await node.start()
    await node.until(lambda: len(list((node.runtime_dir / "spool").glob("*.msg"))) == 1, "the rest")
    assert not await _counting(node, vm) & {"c2", "c3"}
    node.kernel.unreadable.clear()
    await node.clock.move(3601)
    await node.placed(vm, main="4-5")


async def test_an_older_message_changes_nothing(node: Node, vm: Vm) -> None:
    """A create that comes after its poststop, as from a slow spool; nor the same message again."""
    await node.stop()
    await node.hook("createRuntime", "c1", vm.pid)
    (message,) = (node.runtime_dir / "spool").glob("*.msg")
    late = message.read_bytes()
    await node.start()

    async def repeat() -> None:
        other = message.with_suffix(".late")
        other.write_bytes(late)
        other.rename(message)
        await node.until(lambda: not message.exists(), "the message is taken")

    vm.persist(c1="5")
    await node.placed(vm, main="5")
    await repeat()
    await node.ask("reconcile")
    assert {one["cpus"] for one in (await node.shown(vm))["containers"] if one["id"] == "c1"} == {
        "5"
    }
    await node.stopped(vm, "c1")
    assert "c1" not in await _counting(node, vm)
    await repeat()
    assert "c1" not in await _counting(node, vm)


async def test_qemu_is_asked_in_the_first_hooks_only(node: Node) -> None:
    """Kata leaves its socket free while the sandbox's own hook runs: the session ends with it."""
    vm = node.vm("p1")
    (node.host.vc / "vm/p1/qmp.sock").touch()
    for name in (vm.id, "c1"):
        bundle = vm.bundle(name)
        body = json.dumps({"id": name, "pid": vm.pid, "bundle": str(bundle)}).encode()
        reader, writer = await asyncio.open_unix_connection(str(node.runtime_dir / "hook.sock"))
        stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        writer.write(b"KP1 createRuntime %d 6 %d\n" % (stamp, len(body)) + body)
        assert await reader.readline() == b"recorded\n"
        if name == vm.id:
            await node.until(lambda: node.kernel.monitors, "the session")
        else:
            assert await reader.readline() == b"pinned\n"
            assert node.kernel.monitors == []
        writer.close()
        await node.until(lambda: not node.kernel.monitors, "the end of the session")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"id":"c1"}', b'{"id":"c1","bundle":"/a/../x y"}', b"\xff" * 100]
)
async def test_a_hopeless_message_is_refused(node: Node, body: bytes) -> None:
    """The hook does not spool what can never be recorded."""
    reader, writer = await asyncio.open_unix_connection(str(node.runtime_dir / "hook.sock"))
    writer.write(b"KP1 createRuntime 5 6 %d\n" % len(body) + body)
    assert (await reader.readline()).startswith(b"refused ")
    writer.close()


# ---- Kata's files ---------------------------------------------------------------------------


async def test_a_written_state_asks_for_a_pass(node: Node, vm: Vm) -> None:
    """Although nothing in it is new; of that sandbox and no other."""
    other = node.vm("p2")
    await node.create(other, "o1", "7")
    node.host.affinities[other.iothread] = {9}
    await _repaired(node, vm, vm.persist)
    assert other.masks["io"] == "9"


async def test_states_without_a_hook(node: Node) -> None:
    """A folder with any name asks for nothing; one with a VMM is taken in with its containers."""
    folder = node.host.vc / "sbs" / "nobody"
    folder.mkdir()
    (folder / "persist.json").write_text("{}")
    vm = node.vm("p9")
    vm.persist(p9=None, c1="4")
    await node.placed(vm, main="4")
    assert [one["id"] for one in (await node.ask("state"))["sandboxes"]] == ["p9"]


async def test_a_state_after_which_a_poststart_comes(node: Node, vm: Vm) -> None:
    """config.json, which that hook reads, still has the cpuset from before the update."""
    vm.persist(c1="5")
    await node.placed(vm, main="5")
    await node.hook("poststart", "c1", vm.shim, state_id=vm.id)
    await node.ask("reconcile")
    assert vm.masks["main"] == "5"


async def test_a_folder_of_states_that_is_made_anew(node: Node, vm: Vm) -> None:
    """All of the Go runtime's is removed, and made again: it is followed again."""
    shutil.rmtree(node.host.vc / "sbs")
    (node.host.vc / "sbs").mkdir()
    vm.persist(c1="5")
    await node.placed(vm, main="5")
    assert (await node.shown(vm))["mask"] == "5"


async def test_another_pods_state_does_not_speak_for_this_one(node: Node, vm: Vm) -> None:
    """It lists a container of the same id, with another cpuset."""
    other = node.vm("p2")
    await node.create(other, "p2")
    other.persist(c1="9")
    await node.create(other, "c2", "8")
    await node.placed(other, main="8")
    assert vm.masks["main"] == "4"
    assert [one["id"] for one in (await node.shown(other))["containers"]] == ["p2", "c2"]


async def test_the_last_of_many_writes_counts(node: Node, vm: Vm) -> None:
    """A state that is written at once after another one is read a little later."""
    await node.clock.move(1.0)  # the first of these is not at once after what made the pod
    with node.clock.stopped():
        for cpu in (5, 6, 7):
            vm.persist(c1=str(cpu))
            for _ in range(2000):
                await asyncio.sleep(0)
        assert vm.masks["main"] == "5"
    await node.placed(vm, main="7")


async def test_two_writes_within_a_tick(node: Node, vm: Vm) -> None:
    """A file that is written again without another time of change is read again."""
    file = node.host.vc / "sbs/p1/persist.json"
    now_ns = time.time_ns()
    for cpu in ("5", "6"):
        vm.persist(c1=cpu)
        os.utime(file, ns=(now_ns, now_ns))
        await node.placed(vm, main=cpu)
        assert vm.masks["main"] == cpu


async def test_no_descriptor_for_a_state(
    node: Node, vm: Vm, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is concluded from a state that cannot be read now; the audit reads it again."""
    node.kernel.unreadable["sbs/p1/persist.json"] = errno.EMFILE
    vm.persist(c1="5")
    await node.until(lambda: "persist.json: Too many open files" in caplog.text, "a try")
    assert not (await node.request("reconcile"))["ok"]
    assert (vm.masks["main"], await _counting(node, vm)) == ("4", {"p1", "c1"})
    node.kernel.unreadable.clear()
    await node.clock.move(3601)
    await node.placed(vm, main="5")


def _of(sandbox: str, *names: str) -> str:
    return json.dumps(
        {
            "SandboxContainer": sandbox,
            "Config": {"ContainerConfigs": [{"ID": one} for one in names]},
        }
    )


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", _of("p1"), _of("p1", "c2"), _of("", "p1"), _of("p2", "p1")]
)
async def test_a_state_that_is_not_whole_ends_nothing(
    node: Node, vm: Vm, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Neither half a file, nor one of another sandbox; damage that stays is warned of once."""
    file = node.host.vc / "sbs/p1/persist.json"
    file.write_text(text)
    os.utime(file, (LONG_AGO, LONG_AGO))
    for _ in range(3):
        await node.clock.move(3601)
        await node.ask("reconcile")
    assert await _counting(node, vm) == {"p1", "c1"}
    assert caplog.text.count("Kata's state cannot be read") == (text in {"[]", "{"})


async def test_a_later_state_undoes_an_end(node: Node, vm: Vm) -> None:
    """A container that Kata lists again counts again, unless a hook reported its end."""
    vm.forget("c1")
    await node.placed(vm, main=ALL)
    vm.persist(c1="4")
    await node.placed(vm, main="4")
    await node.stopped(vm, "c1")
    vm.persist(c1="4")
    await node.clock.move(3601)
    await node.ask("reconcile")
    assert await _counting(node, vm) == {"p1"}


async def test_a_change_that_cannot_be_stored_is_left_to_the_audit(
    node: Node, vm: Vm, caplog: pytest.LogCaptureFixture
) -> None:
    """An error ends nothing: later events count, and the audit looks again."""
    with node.registry_refuses():
        vm.persist(c1="5")
        while "cannot handle a change" not in caplog.text:
            await node.pause()
    await node.clock.move(3601)
    await node.placed(vm, main="5")
    vm.persist(c1="6")
    await node.placed(vm, main="6")


async def test_a_deep_audit_repeats_a_pass_that_failed(tmp_path: Path) -> None:
    """Also after the retries of half a minute: a full disk may last longer."""
    async with Node(tmp_path, audit=AUDIT, mode="observe") as node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4")
        with node.registry_refuses():
            node.change(mode="act")
            await node.ask("reload")
            for _ in range(15):
                await node.clock.move(16)
                for _ in range(5):
                    await node.pause()
            assert vm.masks["main"] == ALL
        await node.clock.move(30)
        for _ in range(5):
            await node.pause()
        await node.clock.move(3601)
        await node.placed(vm, main="4")


@pytest.mark.parametrize("layout", ["io.containerd.runtime.v2.task/k8s.io", "overlay-containers"])
@pytest.mark.parametrize(("sandbox", "pod"), [("p1", "shop/web"), ("p9", "p1")])
async def test_a_pod_whose_vm_boots_has_its_name(
    node: Node, layout: str, sandbox: str, pod: str
) -> None:
    """From its bundle, before a hook or Kata's state; a bundle of another sandbox says nothing."""
    cri = "io.kubernetes.cri"
    names = {"id": sandbox, "name": "web", "namespace": "shop"}
    annotations = {f"{cri}.sandbox-{key}": value for key, value in names.items()}
    annotations[f"{cri}.container-type"] = "sandbox"
    folder = node.host.bundles / layout / ("p1/userdata" if "overlay" in layout else "p1")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"annotations": annotations}))
    vm = node.vm("p1")
    node.kernel.connector.executed(vm.pid)
    while not (shown := await node.shown(vm)):
        await node.pause()
    assert shown["pod"] == pod
    vm.persist(p1="3")
    await node.placed(vm, main="3")
    assert (await node.shown(vm))["pod"] == pod


async def test_lost_file_events_ask_for_passes(node: Node, vm: Vm) -> None:
    """More events than the kernel keeps for a reader: everything known gets a pass."""
    other = node.vm("p2")
    await node.create(other, "o1", "7")
    names = [node.host.vc / "sbs/p2" / name for name in ("persist.json", "other")]
    file = node.host.vc / "sbs/p1/persist.json"
    soon_ns = time.time_ns() + 10**10

    def write(cpus: str) -> None:
        vm.persist(c1=cpus)
        os.utime(file, ns=(soon_ns, soon_ns))

    write("5")
    await node.placed(vm, main="5")
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())

    def rename() -> None:
        for number in range(limit + 2):
            names[number % 2].rename(names[(number + 1) % 2])

    def flood(last: Callable[[], object]) -> None:  # in one go, while nobody reads the events
        with node.clock.paused():  # else an audit may be due after it, and find what was lost
            for target in (rename, last):
                thread = threading.Thread(target=target)
                thread.start()
                thread.join()

    flood(lambda: write("6"))  # within the same tick, and that event is lost too
    await node.placed(vm, main="6")
    await _repaired(node, vm, lambda: flood(rename), back="6")  # its own files are as before


async def test_a_written_cpuset_asks_for_a_pass(tmp_path: Path) -> None:
    """A cgroup whose cpuset changes narrows or widens its threads: they are placed again."""
    async with Node(tmp_path, audit=AUDIT) as node:
        vm = node.vm("p1", cpuset="0-3")
        await node.create(vm, "c1", "4-5", exclusive=True)
        assert vm.masks["main"] == "0-3"
        node.host.cgroup(f"/kata_{vm.id}", "0-5")
        await node.placed(vm, v0="4", v1="5")


# ---- the kubelet's files, and CPUs ------------------------------------------------------------


async def test_a_changed_checkpoint_asks_for_passes(node: Node) -> None:
    """A pod without a cpuset follows the default set; an unchanged checkpoint asks for nothing."""
    vm = node.vm("p1")
    await node.create(vm, "c1")
    for default in ("0-3", "2-9"):
        node.host.checkpoint("static", default)
        await node.placed(vm, main=default)
    await _not_repaired(node, vm, lambda: node.host.checkpoint("static", "2-9"))


async def test_changed_claims_ask_for_passes(node: Node, vm: Vm) -> None:
    """Of every sandbox: any may have had these CPUs; the same claims again ask for nothing."""
    claim = f"DRA_CPUSET_{'0' * 8}-1-1-1-{'0' * 12}".replace("-1", "-1111")
    for cpus, changed in (("2-3", True), ("2-3", False), ("2", True)):
        devices = [{"name": "claim", "containerEdits": {"env": [f"{claim}={cpus}"]}}]
        spec = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": devices}
        text = json.dumps(spec)
        write = partial(node.host.write, "cdi/claim.json", text)
        if changed:
            await _repaired(node, vm, write)
        else:
            await _not_repaired(node, vm, write)


async def test_a_kernel_without_uevents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; audits find CPUs that went."""
    node = Node(tmp_path, audit=AUDIT)
    node.kernel.cpu_events = None
    async with node:
        vm = node.vm("p1")
        await node.create(vm, "c1", "4-5")
        node.host.set_online("0-4")
        node.host.affinities[vm.iothread] = {0}
        await node.clock.move(601)
        await node.placed(vm, io="4")
    assert caplog.text.count("noticed only by audits") == 1


async def test_cpus_that_went_and_came_back(node: Node, vm: Vm) -> None:
    """Threads lost them: a pass at once, and two when cpusets have followed; then no more."""
    for _ in range(10):
        await node.pause()
    with node.clock.stopped():
        node.host.affinities[vm.iothread] = {9}
        assert node.kernel.cpu_events is not None
        node.kernel.cpu_events.put_nowait(None)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert vm.masks["io"] == "4"
    for _ in range(2):
        await _repaired(node, vm, lambda: None)
    await _not_repaired(node, vm, lambda: None)


# ---- processes ------------------------------------------------------------------------------


async def test_lost_process_events_ask_for_passes(node: Node, vm: Vm) -> None:
    """Everything known gets a pass, and what is not known is looked for."""
    other = node.vm("p2")
    other.persist()
    await _repaired(node, vm, node.kernel.connector.lose)
    while not await node.shown(other):
        await node.pause()


async def test_a_vmm_that_does_not_answer_is_asked_again(node: Node) -> None:
    """Its memory is locked: once that ends its sandbox is taken in, without another event."""
    vm = node.vm("p2")
    vm.bundle("p2")
    node.kernel.locked.add(vm.pid)
    node.kernel.connector.executed(vm.pid)
    for _ in range(20):
        await node.pause()
    assert await node.shown(vm) == {}
    node.kernel.locked.clear()
    await node.clock.move(2)
    for _ in range(100):
        if await node.shown(vm):
            return
        await node.pause()
    raise AssertionError("the sandbox is not known")


async def test_a_program_that_a_shim_starts(node: Node, vm: Vm) -> None:
    """It may serve the sandbox: it is looked at, and pinned."""
    argv = ["virtiofsd", f"--shared-dir=/run/kata-containers/shared/sandboxes/{vm.id}/shared"]
    pid = node.host.process("virtiofsd", exe="/usr/libexec/virtiofsd", argv=argv, ppid=vm.shim)
    node.kernel.connector.executed(pid)
    await node.until(lambda: node.host.affinities[pid] == {4}, "virtiofsd is pinned")


async def test_a_vhost_worker_gets_its_name_later(node: Node, vm: Vm) -> None:
    """On Linux 6.1 it is born as `kthreadd`, and no event follows."""
    worker = node.host.process("kthreadd", ppid=2, flags=0x0020_8040)
    node.kernel.connector.born(worker, worker, 2)
    await node.pause()
    for path in (f"proc/{worker}/stat", f"proc/{worker}/task/{worker}/stat"):
        node.host.write(path, node.host.read(path).replace("kthreadd", f"vhost-{vm.pid}"))
    for name in ("comm",):
        node.host.write(f"proc/{worker}/task/{worker}/{name}", f"vhost-{vm.pid}")
    await node.until(lambda: node.host.affinities[worker] == {4}, "the vhost worker is pinned")
