"""What exclusive pCPUs are worth by Kata's defaults, by its own pinning rule, and by kata-pin.

One pod has two exclusive pCPUs and keeps both busy. Another one has the rest of a node of four
pCPUs, which it fills: it sends packets by vhost-net and writes to its shared folder (virtiofs) as
fast as it can. Meanwhile `kata-pin prove` records every task switch on the exclusive pCPUs.
Whatever else runs on the node is kept off them, so that what is left are the pods' own threads.
Then its loops end, and cyclictest and oslat (rt-tests) measure in its guest how late threads are.

All are measured with the same guests, load and code, under the Go runtime and under runtime-rs,
whose default has virtiofsd in the pod's cpuset; while Kata is on its own the daemon only observes.
With `spare` the owner has a third exclusive pCPU and no more vCPUs: its overhead runs there.
Everything is emulated: shares of time say which thread ran where, not how fast a real node is.
docs/performance.md says what was seen. Run by hand: it takes minutes, and an emulated machine needs
KATA_PIN_LAB_QEMU=trixie.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.proc import kernel_worker
from kata_pin.placement.remedies import WORKQUEUES, mask
from tests.e2e import linuxguest
from tests.e2e.idlevm import idle_vm
from tests.e2e.katapods import private_daemon
from tests.e2e.linuxguest import Guest, Ran, hooks, linux, vcpus
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.minikata import Minikata, minikata_node

pytestmark = [pytest.mark.usefixtures("kvm"), pytest.mark.timeout(2700)]

SHARED: Final = frozenset({0, 1})
EXCLUSIVE: Final = frozenset({2, 3})
SPARE: Final = 4
WINDOWS: Final = 3
WINDOW_S: Final = 10
LATENCY_S: Final = 20
LEAST_SHARE: Final = 0.02
"""Least share of a pCPU's time that the vhost workers take, and virtiofsd, under load."""

BUSY: Final = "while :; do :; done & while :; do :; done"
"""As many loops as the owner's VM has vCPUs."""

SEND: Final = """
from _socket import AF_INET, SOCK_DGRAM, socket
end, packet = socket(AF_INET, SOCK_DGRAM), b"x" * 1400
while True:
    try:
        end.sendto(packet, ("10.77.1.1", 9))
    except OSError:
        pass
"""

WRITE: Final = """
import posix
file = posix.open("/load/shared/file", posix.O_RDWR | posix.O_CREAT, 0o600)
while True:
    posix.pwrite(file, b"x" * 65536, 0)
"""

WORK: Final = f"""
for module in /load/*.ko; do insmod $module; done
ip link set eth0 up
ip addr add 10.77.1.2/24 dev eth0
mkdir /load/shared
mount -t virtiofs kataShared /load/shared
echo '{SEND}' >/load/send.py
echo '{WRITE}' >/load/write.py
while sleep 2; do
    [ -e /load/shared/go ] || continue
    for program in send write; do /usr/bin/python3 -IS /load/$program.py & done
    while :; do :; done &
    while [ -e /load/shared/go ]; do sleep 0.5; done
    kill $(jobs -p)
done
"""
"""Works while there is a file `go` in its shared folder."""

SWITCHES: Final = struct.pack("IIQ24xQ16x", 1, 64, 9, 1 << 26)
"""struct perf_event_attr: a dummy of software's, which records task switches."""
PERF_EVENT_OPEN: Final = 298
"""The call's number on x86-64, which the lab has."""

END_LOOPS: Final = (
    "for pid in $(cat /sys/fs/cgroup/kata/*-c/cgroup.procs); do [ $pid = $$ ] || kill $pid; done"
)

Json = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """Who places the threads: `own_rule` is Kata's setting enable_vcpus_pinning."""

    runtime: str
    own_rule: bool = False
    mode: str = "observe"
    spare: bool = False


WAYS: Final = {
    "default": Way("go"),
    "rule": Way("go", own_rule=True),
    "katapin": Way("go", mode="act"),
    "katapin-spare": Way("go", mode="act", spare=True),
    "rs-default": Way("rs"),
    "rs-katapin": Way("rs", mode="act"),
}


@dataclass(frozen=True)
class Figures:
    """Of both exclusive pCPUs together; shares in percent of their time, slices per second."""

    verdict: str
    others: float
    others_slices: float
    others_longest_ms: float
    user: float
    kernel: float
    own_overhead: float
    vcpu_ran: float
    vcpu_waited: float
    vhost: float
    """How long the other pod's vhost workers ran on any pCPU, in percent of one."""
    virtiofsd: float
    tasks: dict[str, float]
    """Share of each task of others that had any, by class and name."""


@dataclass(frozen=True)
class Latency:
    """How late a thread of the owner's guest is, in ms."""

    timers: dict[str, float]
    """By percentile, of the wake-ups of cyclictest's threads; `max`: the longest."""
    wakeups: int
    stalls: dict[str, float]
    """The same of oslat's loop, of its stalls of 0.1 ms or more."""
    stalls_per_s: float
    stalled: float
    """How long these lasted together, in percent of the time."""


class PodsOfNode:
    """Pods of minikata, whose guests boot Linux, and the daemon that knows of them."""

    def __init__(self, daemon: PrivateNode, kata: Minikata, stack: ExitStack) -> None:
        self._daemon = daemon
        self._kata = kata
        self._stack = stack
        self._started: dict[str, tuple[int, int]] = {}
        """The pids of a pod's QEMU and virtiofsd."""

    def start(
        self, name: str, work: str, *, runtime: str, own_rule: bool = False, **cpu: Any
    ) -> tuple[str, ExitStack]:
        """Start a pod with one container; return its id, and what ends it before the rest."""
        pod = self._daemon.id_of(name)
        rule = {
            "io.katacontainers.enable_vcpus_pinning": str(own_rule).lower(),
            "minikata.runtime": runtime,
        }
        before = self._kata.processes() if self._started else []
        stack = self._stack.enter_context(ExitStack())
        every = SHARED | EXCLUSIVE | {SPARE}
        os.sched_setaffinity(0, every)  # as containerd has: shims inherit it
        for container, said, resources in (
            (pod, rule, {}),
            (f"{pod}-c", {**rule, "minikata.guest.run": work}, cpu),
        ):
            made = hooks(self._daemon.runtime_dir)
            one = self._kata.container(container, pod, hooks=made, annotations=said, **resources)
            stack.enter_context(one).start()
        os.sched_setaffinity(0, SHARED)
        _, server, qemu, *_ = self._kata.processes()[len(before) :]  # in the order of their start
        self._started[pod] = qemu, server
        return pod, stack

    def qemu(self, pod: str) -> int:
        """Return the pid of a pod's QEMU."""
        return self._started[pod][0]

    def run(self, node: Node, pod: str, command: str) -> str:
        """Run a command in a pod's container; return its output."""
        arguments = Path(f"/proc/{self.qemu(pod)}/cmdline").read_text()
        cid = re.search(r"guest-cid=([0-9]+)", arguments)
        assert cid, arguments
        return Guest(node, int(cid[1])).ask(f"run {pod}-c {command}")

    def virtiofsd(self, pod: str) -> list[int]:
        """Return the threads of a pod's virtiofsd: the first process's child does the work."""
        pid = self._started[pod][1]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [tid for one in (pid, *map(int, children)) for tid in _threads(one)]

    def go(self, pod: str, *, on: bool) -> None:
        """Have a load work, or rest."""
        file = self._daemon.dirs.shared / pod / "shared/go"
        file.touch() if on else file.unlink()

    def keep_rest_off(self) -> None:
        """Keep all tasks but the pods' off the exclusive pCPUs, as an administrator would."""
        pods = self._processes()
        threads: set[int] = set()
        for pid in pods:
            with suppress(OSError):  # it ended
                threads.update(_threads(pid))
        for path in Path("/proc").glob("[0-9]*/task/[0-9]*"):
            with suppress(OSError):  # it ended, or is a kernel thread of one CPU
                worker = kernel_worker((path / "comm").read_text().rstrip("\n"))
                tid = int(path.name)
                own = int(path.parts[2]) in pods or (worker and worker.owner in threads)
                if not own and os.sched_getaffinity(tid) & EXCLUSIVE:
                    os.sched_setaffinity(tid, SHARED)
                    self._stack.callback(_let_go, tid)

    def _processes(self) -> set[int]:
        """Return every process that was started for a pod, and their children."""
        found = set(self._kata.processes())
        for pid in tuple(found):
            with suppress(OSError):  # it ended
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                found.update(map(int, children.split()))
        return found


@pytest.fixture(scope="module")
def small_node(node: Node, kvm: None) -> Iterator[None]:
    """A node of four pCPUs, which are sooner filled, and a spare one; without another kata-pin.

    A user of perf and a VM are there all the time: once, without them, an emulated machine ended
    without a word when a run did. It still may, or a VM in it (docs/lab.md).
    """
    online = [Path(f"/sys/devices/system/cpu/cpu{cpu}/online") for cpu in range(5, node.cpus)]
    before = Path(WORKQUEUES).read_text()
    perf = ctypes.CDLL(None).syscall(PERF_EVENT_OPEN, SWITCHES, -1, 0, -1, 0)
    assert perf >= 0
    node.run(["systemctl", "stop", "kata-pin"], seconds=60)
    try:
        with idle_vm(node):
            for file in online:
                file.write_text("0")
            Path(WORKQUEUES).write_text(mask(CpuSet(SHARED)))
            yield
    finally:
        Path(WORKQUEUES).write_text(before)
        for file in online:
            file.write_text("1")
        os.close(perf)
        node.run(["systemctl", "start", "kata-pin"], seconds=60)


@pytest.fixture(scope="module")
def daemon(node: Node) -> Iterator[PrivateNode]:
    """A daemon that only observes, at first."""
    with private_daemon(**_settings(node, "observe")) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def pods(node: Node, daemon: PrivateNode, small_node: None) -> Iterator[PodsOfNode]:
    """Where pods are started; they live until a failure is diagnosed."""
    if not (linuxguest.GUEST / "initrd.img").exists():
        pytest.skip(f"no guest in {linuxguest.GUEST}")
    folder = Path(tempfile.mkdtemp(prefix="mk"))
    settings = linux(node, default_vcpus=2, default_maxvcpus=2, default_memory=256)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        stack.callback(shutil.rmtree, folder)
        kata = stack.enter_context(minikata_node(folder, daemon.dirs, **settings))
        yield PodsOfNode(daemon, kata, stack)


def _settings(node: Node, mode: str, *, spare: bool = False) -> Json:
    patience = {"connect_ms": int(1000 * node.scale), "call_ms": int(2000 * node.scale)}
    return {"mode": mode, "guest": patience, "overhead": "reserve:1" if spare else "auto"}


@pytest.fixture
def load(node: Node, daemon: PrivateNode, pods: PodsOfNode, way: str) -> Iterator[str]:
    """The pod that has the rest of the node, under the runtime to measure; it rests at first."""
    _configure(node, daemon, "observe")
    pod, ends = pods.start(
        *(f"load-{way}", WORK),
        runtime=WAYS[way].runtime,
        cpus=str(CpuSet(SHARED)),
        shares=102,
    )
    with ends:
        _connect(node, pods.qemu(pod))
        yield pod


def _configure(node: Node, daemon: PrivateNode, mode: str, *, spare: bool = False) -> None:
    daemon.configure(**_settings(node, mode, spare=spare), paths=daemon.settings["paths"])
    assert daemon.daemon is not None
    daemon.daemon.reload()


@pytest.mark.parametrize("way", WAYS)
def test_foreign_time_under_load(
    node: Node, daemon: PrivateNode, pods: PodsOfNode, load: str, way: str, *,
    switch: Callable[[int, bool], None],
) -> None:  # fmt: skip
    """With kata-pin nobody else has the exclusive pCPUs, at the default limit of 0.1 %.

    How much they have by Kata's ways depends on the kernel: which of their threads are in a cpuset,
    and where its scheduler puts the rest.
    """
    chosen = WAYS[way]
    spare = {SPARE} if chosen.spare else frozenset[int]()
    if not chosen.spare:
        switch(SPARE, False)
    _configure(node, daemon, chosen.mode, spare=chosen.spare)
    owned = CpuSet(EXCLUSIVE | spare)
    owner, ends = pods.start(
        *(way, BUSY), runtime=chosen.runtime, own_rule=chosen.own_rule,
        cpus=str(owned), quota=100_000 * len(owned), period=100_000,
    )  # fmt: skip
    with ends:
        daemon.ask("reconcile")
        _tell(node, f"{way}: the owner runs")
        _wait_placed(node, pods, chosen, owner, load)
        pods.keep_rest_off()
        pods.go(load, on=True)
        try:
            node.wait(lambda: _is_busy(pods, load), "the load to be at work", seconds=60)
            _tell(node, f"{way}: the load is at work")
            windows = [_measure(daemon, pods, owner, load) for _ in range(WINDOWS)]
            results = json.dumps([asdict(one) for one in windows], indent=1)
            (node.results_folder() / f"figures-{way}.json").write_text(results)
            _tell(node, f"{way}: others had {', '.join(f'{one.others:.2f} %' for one in windows)}")
            pods.run(node, owner, END_LOOPS)
            latency = _latency(*(pods.run(node, owner, one) for one in _programs(CpuSet({0, 1}))))
            assert _is_busy(pods, load), "the load has ended"
        finally:
            pods.go(load, on=False)
    (node.results_folder() / f"latency-{way}.json").write_text(json.dumps(asdict(latency)))
    _tell(node, f"{way}: {latency}")
    assert min(min(one.vhost, one.virtiofsd) for one in windows) > 100 * LEAST_SHARE, "no load"
    if chosen.mode == "act":
        assert {one.verdict for one in windows} == {"proved"}


def _tell(node: Node, text: str) -> None:
    """Note a line, on the console too: that remains if the machine does not."""
    node.tell(text)
    Path("/dev/kmsg").write_text(f"<1>figures: {text}\n")


def _connect(node: Node, qemu: int) -> None:
    """Give the host's end of a VM's network an address: packets arrive, and nobody wants them."""
    for info in Path(f"/proc/{qemu}/fdinfo").iterdir():
        with suppress(OSError):
            if name := re.search(r"^iff:\s*(\S+)", info.read_text(), re.MULTILINE):
                node.run(["ip", "addr", "add", "10.77.1.1/24", "dev", name[1]])
                node.run(["ip", "link", "set", name[1], "up"])
                return
    raise AssertionError(f"QEMU {qemu} has no tap")


def _wait_placed(node: Node, pods: PodsOfNode, way: Way, owner: str, load: str) -> None:
    """Wait until the threads may run where this way has them."""
    either = {frozenset([cpu]) for cpu in EXCLUSIVE}
    paired = way.own_rule or way.mode == "act"
    vcpu_cpus = either if paired else {EXCLUSIVE}
    apart = way.mode == "act" or way.runtime == "rs"  # its default: in the pod's cpuset
    helper_cpus = SHARED if apart else SHARED | EXCLUSIVE
    seen: list[set[frozenset[int]]] = []

    def placed() -> bool:
        seen[:] = [
            {_affinity(tid) for tid in vcpus(pods.qemu(owner)).values()},
            {_affinity(tid) for tid in pods.virtiofsd(load)},
        ]
        return seen == [vcpu_cpus, {helper_cpus}]

    try:
        node.wait(placed, "the threads to be placed", seconds=60)
    except AssertionError as error:
        error.add_note(str(seen))
        raise


def _affinity(tid: int) -> frozenset[int]:
    """Return where a thread may run of what is online: nowhere once it is gone."""
    with suppress(ProcessLookupError):
        return frozenset(os.sched_getaffinity(tid)) & (SHARED | EXCLUSIVE)
    return frozenset()


def _let_go(tid: int) -> None:
    """Allow a task every CPU, also those that are still offline."""
    with suppress(OSError):
        os.sched_setaffinity(tid, range(os.sysconf("SC_NPROCESSORS_CONF")))


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _measure(daemon: PrivateNode, pods: PodsOfNode, owner: str, load: str) -> Figures:
    """Run `prove` for a while, and see how long the load's helpers run meanwhile."""
    mine = set(vcpus(pods.qemu(owner)).values())
    before = Ran.now()
    done = daemon.cli("prove", owner, "--for", f"{WINDOW_S}s", "--json")
    ran = Ran.now().since(before)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["method"] == "perf", document["refused"]
    rows = document["pcpus"]
    rows = [row for row in rows if row["cpu"] != SPARE]
    assert {row["cpu"] for row in rows} == set(EXCLUSIVE), rows
    assert not any(row["lost"] for row in rows)
    vhost, virtiofsd = _helpers_shares(pods, load, ran)
    return _figures(document["verdict"], rows, mine, vhost=vhost, virtiofsd=virtiofsd)


def _is_busy(pods: PodsOfNode, load: str) -> bool:
    """Whether vhost workers and virtiofsd have work; this takes a second or more."""
    before = Ran.now()
    time.sleep(1.0)
    return min(_helpers_shares(pods, load, Ran.now().since(before))) > LEAST_SHARE


def _helpers_shares(pods: PodsOfNode, load: str, ran: Ran) -> tuple[float, float]:
    """Return how long the load's vhost workers and virtiofsd ran, as shares of one pCPU's time."""
    worker = f"vhost-{pods.qemu(load)}"
    vhost = sum(ran.share(tid) for tid, one in ran.threads.items() if one.name == worker)
    return vhost, sum(ran.share(tid) for tid in pods.virtiofsd(load) if tid in ran.threads)


def _figures(
    verdict: str, rows: list[Json], vcpu_tids: set[int], *, vhost: float, virtiofsd: float
) -> Figures:
    """Sum up the rows of both pCPUs."""
    tasks = [task for row in rows for task in row["tasks"]]
    own = [thread for row in rows for thread in row["own"]]
    window_ms: float = sum(1000 * row["window_s"] for row in rows)
    others = [task for task in tasks if task["task_class"] == "other-sandbox"]
    pods_own = [task for task in tasks if task["task_class"] == "same-pod"]
    overhead_ms = sum(t["here_ms"] for t in own if t["tid"] not in vcpu_tids)
    overhead_ms += sum(t["total_ms"] for t in pods_own if t["tid"] not in vcpu_tids)
    named: Counter[str] = Counter()
    for task in tasks:
        if task["task_class"] != "per-cpu-kernel":
            named[f"{task['task_class']} {task['comm']}"] += task["total_ms"]
    times = {t["tid"]: t for t in own if t["tid"] in vcpu_tids}  # each may be in both rows
    assert set(times) == vcpu_tids

    def share(ms: float) -> float:
        return 100 * ms / window_ms

    def of_class(*classes: str) -> float:
        return share(sum(t["total_ms"] for t in tasks if t["task_class"] in classes))

    return Figures(
        verdict=verdict,
        others=share(sum(task["total_ms"] for task in others)),
        others_slices=sum(task["slices"] for task in others) / rows[0]["window_s"],
        others_longest_ms=max((task["longest_ms"] for task in others), default=0.0),
        user=of_class("user", "unknown"),
        kernel=of_class("unbound-kernel"),
        own_overhead=share(overhead_ms),
        vcpu_ran=share(sum(one["ran_ms"] for one in times.values())),
        vcpu_waited=share(sum(one["waited_ms"] for one in times.values())),
        vhost=round(100 * vhost, 1),
        virtiofsd=round(100 * virtiofsd, 1),
        tasks={name: share(ms) for name, ms in named.most_common()},
    )


def _programs(cpus: CpuSet) -> tuple[str, str]:
    """Return shell commands of cyclictest and oslat on two CPUs, which print what they measured.

    A timer for each CPU, which rests meanwhile; then a loop on the second one.
    """
    first, last = cpus
    outcome = f"-D {LATENCY_S} --json=/latency >/latency.txt 2>&1; cat /latency"
    return (
        f"cyclictest -q -m -p 95 -i 4000 -h 50000 -t 2 -a {cpus} {outcome}",
        f"oslat -f 95 -c {last} -C {first} -b 1024 -W 100000 {outcome}",
    )


def _latency(cyclictest: str, oslat: str) -> Latency:
    """Sum up what both programs report as JSON."""
    threads = list(json.loads(cyclictest)["thread"].values())
    wakeups = Counter[int]()
    for thread in threads:
        wakeups.update({int(us): times for us, times in thread["histogram"].items()})
    (loop,) = json.loads(oslat)["thread"].values()
    stalls = Counter({int(us): times for us, times in loop["histogram"].items() if int(us) > 100})
    stalled_us = sum(us * times for us, times in stalls.items())
    return Latency(
        timers=_percentiles(wakeups, max(thread["max"] for thread in threads)),
        wakeups=wakeups.total(),
        stalls=_percentiles(stalls, loop["max"]),
        stalls_per_s=stalls.total() / loop["duration"],
        stalled=stalled_us / loop["duration"] / 1e4,
    )


def _percentiles(times: Counter[int], most: int) -> dict[str, float]:
    """Return percentiles in ms of a histogram in us; what exceeds its end counts as its end."""
    found = {}
    for percentile in (50, 99, 99.9):
        left = times.total() * percentile / 100
        for us in sorted(times):
            left -= times[us]
            if left <= 0:
                found[f"p{percentile:g}"] = us / 1000
                break
    return {**found, "max": most / 1000}
