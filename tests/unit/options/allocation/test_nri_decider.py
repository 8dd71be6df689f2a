"""What NRI is answered: adjustments, updates of others, refusals, and what is left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AttachedDevice, DeviceNode, PodSpec
from kata_pin.base.config.alloc import Fail
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import StateError, VmmError
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import Eligibility
from kata_pin.base.steps import Steps
from kata_pin.base.values import ContainerState, CpuClass, Guarantee
from kata_pin.engine.sandbox_cache import KataPinningReader
from kata_pin.engine.sandboxes import Sandboxes
from kata_pin.follow.reports import NOTHING, NriIntake
from kata_pin.linux.files import HostRoot
from kata_pin.linux.process import ProcessIndex
from kata_pin.options.allocation import adjustments, option
from kata_pin.options.allocation.adjustments import HostDevices
from kata_pin.options.allocation.grants import PendingPasses
from kata_pin.options.allocation.nri_decider import OTHERS, NriDecider
from kata_pin.peers.nri.messages import Event, EventKind, Pod, PodContainer, Snapshot
from kata_pin.peers.nri.replies import Cpuset, NriAnswer
from kata_pin.peers.nri.session import CreationRefused
from kata_pin.peers.oci import CpuResources
from kata_pin.records.containers import Registry
from kata_pin.vmm.find import VmmFinder
from tests.support.allotted import Host, allocator, request
from tests.support.vmmhost import no_survey
from tests.support.world import cpus, flat

QEMU, PAUSE = 100, 200
KEY = "cpu-policy.kata-pin.io"
CREATE, UPDATE, STOP = (
    *(EventKind.CREATE_CONTAINER, EventKind.UPDATE_CONTAINER),
    EventKind.STOP_CONTAINER,
)


class World:
    """A decider over a real registry and allocator; which pods have a VM is played."""

    def __init__(self, registry: Registry, **settings: Any) -> None:
        self.registry = registry
        self.host = Host()
        self.kata: set[str] = set()
        finder = SimpleNamespace(
            is_kata=lambda pid: pid == QEMU,
            find=self._find,
            sandboxes=self._running,
            is_claimed=lambda _id, _pids: False,
        )
        index = SimpleNamespace(refresh=lambda: None)
        pins = SimpleNamespace(take_annotations=lambda _id, _annotations: None)
        self.awaited: list[str] = []
        sandboxes = SimpleNamespace(
            vmms={},
            cache=lambda _id: None,
            known_vmm=lambda _id: None,
            mark=lambda *_: 1,
            ids=("web", "db"),
            wait_for_pass=self._settled,
        )
        intake = NriIntake(
            registry,
            cast("VmmFinder", finder),
            cast("ProcessIndex", index),
            cast("KataPinningReader", pins),
            cast("Sandboxes", sandboxes),
            no_survey(),
        )
        self.passes = PendingPasses(cast("Sandboxes", sandboxes))
        self.allocator = allocator(registry, self.host, self.passes, **settings)
        self.ledger = self.allocator.ledger
        self.decider = NriDecider(intake, self.allocator, registry, self.passes)
        self._stamp = 1000

    def _running(self, _known: object) -> Steps[dict[str, int]]:
        """Return the sandboxes with a VM."""
        yield from ()
        return dict.fromkeys(self.kata, QEMU)

    def tell(self, kind: EventKind, pod: Pod, container: PodContainer, **fields: Any) -> NriAnswer:
        """Have an event answered, or only taken if it needs no answer."""
        self._stamp += 1
        event = Event(kind, pod, container, **fields)
        if kind in (CREATE, UPDATE, STOP):
            return self.decider.decide(event, self._stamp)
        self.decider.receive(event, self._stamp)
        return NriAnswer()

    def make(self, pod: Pod, container: PodContainer) -> NriAnswer:
        """Create a container with success."""
        answer = self.tell(CREATE, pod, container)
        made = _with(container, answer.adjust)
        self.tell(EventKind.POST_CREATE_CONTAINER, pod, made)
        return answer

    @property
    def guarantee(self) -> Guarantee:
        return self.allocator.guarantee

    async def _settled(self, sandbox_id: str, _ticket: int) -> None:
        self.awaited.append(sandbox_id)

    def _find(self, sandbox_id: str) -> int:
        if sandbox_id not in self.kata:
            raise VmmError("none")
        return QEMU


@pytest.fixture
def world(registry: Registry) -> World:
    return World(registry)


def _pod(name: str, cpu_class: str = "", *, kata: bool = True) -> Pod:
    return Pod(
        name,
        name=name,
        namespace="shop",
        uid=f"uid-{name}",
        handler="kata" if kata else "",
        pid=QEMU if kata else PAUSE,
        annotations={KEY: cpu_class} if cpu_class else {},
    )


def _app(pod: str, limit: int = 0, **fields: Any) -> PodContainer:
    """Return a container whose CPU request is its limit, in CPUs."""
    cpu = CpuResources(
        quota_us=limit * 100_000 or None, period_us=100_000, shares=limit * 1024 or None
    )
    return PodContainer(f"c-{pod}", pod, name="app", **({"cpu": cpu} | fields))


def _with(container: PodContainer, cpuset: Cpuset) -> PodContainer:
    cpu = replace(container.cpu, cpus=str(cpuset.cpus) or container.cpu.cpus)
    return replace(container, cpu=cpu)


def _updates(answer: NriAnswer) -> dict[str, str]:
    return {one.container_id: str(one.cpuset.cpus) for one in answer.updates}


def test_a_cpuset_from_before_is_no_conflict(world: World) -> None:
    """A next try that comes with a cpuset is no evidence of a later plugin."""
    pod, first = _pod("db", "exclusive"), _app("db", 1)
    world.tell(CREATE, pod, first)
    world.tell(STOP, pod, first)
    world.make(pod, _with(replace(first, id="c-db-2"), Cpuset(cpus("1"))))
    assert (world.allocator.conflicts.conflicts, world.allocator.conflicts.given) == (0, 1)


def test_our_own_update_by_cri_changes_nothing(world: World) -> None:
    """It comes back as an event: nothing is noted before it is made, and nothing goes along."""
    web, app = _pod("web", kata=False), _app("web")
    world.make(web, app)
    world.make(_pod("log", kata=False), _app("log"))
    world.allocator.admit(request("db", "exclusive", cpus=2, kata=False))
    pending = world.ledger.pending(world.allocator.now)
    assert set(pending) == {"c-web", "c-log"}
    asked = CpuResources(cpus=str(pending["c-web"].cpus), quota_us=0, period_us=0, shares=0)
    with world.ledger.pushing("c-web", pending["c-web"]):
        assert world.tell(UPDATE, web, app, asked=asked) == NriAnswer()
        assert world.ledger.pending(world.allocator.now) == pending
        made = _with(app, pending["c-web"])
        world.tell(EventKind.POST_UPDATE_CONTAINER, web, made)
    assert set(world.ledger.pending(world.allocator.now)) == {"c-log"}


def test_somebody_elses_update_while_we_push(world: World) -> None:
    """It is taken as any other; what is being pushed is in no answer."""
    web, app = _pod("web", kata=False), _app("web")
    world.make(web, app)
    world.make(_pod("log", kata=False), _app("log"))
    world.allocator.admit(request("db", "exclusive", cpus=2, kata=False))
    cpuset = world.ledger.pending(world.allocator.now)["c-web"]
    with world.ledger.pushing("c-web", cpuset):
        answer = world.tell(UPDATE, web, app, asked=CpuResources(cpus="0-7"))
        assert set(_updates(answer)) == {"c-log"}
    assert world.ledger.pending(world.allocator.now) == {"c-web": cpuset}


def test_our_own_update_that_is_out_of_date(world: World) -> None:
    """What was decided after it was sent takes its place, for that container; it is sent again."""
    web, app = _pod("web", kata=False), _app("web")
    world.make(web, app)
    world.make(_pod("log", kata=False), _app("log"))
    world.allocator.admit(request("db", "exclusive", cpus=2, kata=False))
    old = world.ledger.pending(world.allocator.now)["c-web"]
    with world.ledger.pushing("c-web", old):
        world.allocator.admit(request("more", "exclusive", cpus=2, kata=False))
        new = world.ledger.pending(world.allocator.now)["c-web"]
        answer = world.tell(UPDATE, web, app, asked=CpuResources(cpus=str(old.cpus)))
        assert _updates(answer) == {"c-web": str(new.cpus)}
        world.tell(EventKind.POST_UPDATE_CONTAINER, web, _with(app, new))
    assert set(world.ledger.pending(world.allocator.now)) == {"c-web", "c-log"}


def test_whatever_may_decide_wakes_who_pushes(world: World) -> None:
    """Each event, and the end of Synchronize, may leave something that no answer took along."""
    web, app = _pod("web", kata=False), _app("web")
    for kind in (CREATE, EventKind.POST_CREATE_CONTAINER, UPDATE, STOP):
        world.ledger.changed.clear()
        world.tell(kind, web, app)
        assert world.ledger.changed.is_set()


async def test_who_starts_alone_waits_for_those_who_leave(world: World) -> None:
    """A start on exclusive CPUs is answered after the passes over the sandboxes that had them."""
    world.make(_pod("web"), _app("web"))
    world.passes.ended("web")
    pod, app = _pod("db", "exclusive", kata=False), _app("db", 2)
    world.make(pod, app)
    start = Event(EventKind.START_CONTAINER, pod, app)
    ticket = world.decider.receive(start, 5000)
    assert ticket == OTHERS
    await world.decider.placed(start, ticket)
    assert world.awaited == ["web"]
    world.passes.ended("web")
    await world.decider.placed(start, ticket)
    assert world.awaited == ["web"]


def test_who_starts_in_the_pool_waits_for_nobody(world: World) -> None:
    """Without own CPUs there is no pass to wait for."""
    pod, app = _pod("web", kata=False), _app("web")
    world.make(pod, app)
    assert world.decider.receive(Event(EventKind.START_CONTAINER, pod, app), 5000) == NOTHING


def test_who_is_made_meanwhile_gets_all_its_cpus(world: World) -> None:
    """A container that is made while CPUs are held back has them in its cpuset: it starts later."""
    world.make(_pod("db", "exclusive"), _app("db", 4))
    resize = CpuResources(quota_us=100_000, period_us=100_000, shares=1024)
    world.tell(UPDATE, _pod("db", "exclusive"), _app("db", 4), asked=resize)
    assert world.allocator.grants.held_back
    answer = world.make(_pod("new", "exclusive", kata=False), _app("new", 4))
    assert answer.adjust.cpus == _own(world, "c-new")
    assert answer.adjust.cpus & world.allocator.grants.held_back
    plain = world.make(_pod("web", kata=False), _app("web"))
    assert not plain.adjust.cpus & world.allocator.grants.held_back


def _own(world: World, container_id: str) -> CpuSet:
    grant = world.allocator.state.get(container_id)
    assert grant is not None
    return grant.exclusive


def test_a_record_before_synchronize(world: World) -> None:
    """A container first reported by Kata's state has its annotation once the runtime reports it."""
    record = Container(
        "c-db", "db", state=ContainerState.RUNNING, pod_name="db", pod_namespace="shop",
        pod_uid="uid-db", quota_us=100_000, period_us=100_000, shares=1024, name="app",
    )  # fmt: skip
    world.registry.adopt(record)
    option.view(world.allocator, (record,))
    assert world.allocator.state.exclusive == CpuSet()
    world.kata = {"db"}
    world.decider.adopt(Snapshot((_pod("db", "exclusive"),), (_app("db", 1),)))
    assert len(world.allocator.state.exclusive) == 1


def test_annotations_of_the_creation_are_old(world: World) -> None:
    """What the kubelet reported later counts for new containers, and after a reconnection."""
    pod, one = _pod("db"), _app("db", 1)
    shared = world.make(pod, one).adjust
    world.allocator.set_specs({"uid-db": PodSpec({KEY: "exclusive"})})
    own = world.allocator.state.exclusive
    assert len(own) == 1
    world.kata = {"db"}
    world.decider.adopt(Snapshot((pod,), (_with(one, shared),)))
    assert world.allocator.state.exclusive == own
    world.allocator.set_specs({})  # another daemon, that has not asked the kubelet yet
    world.decider.adopt(Snapshot((pod,), (_with(one, shared),)))
    assert world.allocator.state.exclusive == own
    world.allocator.set_specs({"uid-db": PodSpec({KEY: "exclusive"})})
    second = replace(_app("db", 1), id="c-db-2", name="second")
    assert len(world.make(pod, second).adjust.cpus) == 1


def test_synchronize_leaves_other_runtimes_sandboxes(world: World) -> None:
    """A sandbox that this runtime does not list keeps what it has."""
    record = Container(
        "c-x", "x", state=ContainerState.RUNNING, pod_name="x", pod_namespace="shop",
        quota_us=100_000, period_us=100_000, shares=1024, name="app",
    )  # fmt: skip
    world.registry.adopt(record)
    world.allocator.set_orders({"shop/x": CpuClass.EXCLUSIVE})
    option.view(world.allocator, (record,))
    had = world.allocator.state.exclusive
    assert len(had) == 1
    world.decider.adopt(Snapshot((_pod("web", kata=False),), (_app("web"),)))
    assert world.allocator.state.exclusive == had


def test_an_end_that_is_not_stored(world: World) -> None:
    """It is taken again, as the plugin does then, and releases everything."""
    pod, one = _pod("db", "exclusive", kata=False), _app("db", 2)
    world.make(_pod("web", kata=False), _app("web"))
    world.make(pod, one)
    with failing_commits(world.registry), pytest.raises(StateError):
        world.tell(STOP, pod, one)
    assert len(world.allocator.state.exclusive) == 2
    world.decider.receive(Event(STOP, pod, one), 9000)
    assert world.allocator.state.exclusive == CpuSet()
    assert world.ledger.pending(world.allocator.state) == {"c-web": Cpuset(CpuSet(range(8)))}


@contextlib.contextmanager
def failing_commits(registry: Registry) -> Iterator[None]:
    """Make every transaction that stores a decision fail where it is committed."""
    for statement in (
        "PRAGMA foreign_keys = ON",
        "CREATE TABLE parent (number INTEGER PRIMARY KEY)",
        "CREATE TABLE child (number REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER orphan AFTER INSERT ON alloc BEGIN INSERT INTO child VALUES (1); END",
    ):
        registry.run(statement)
    yield
    for statement in ("DROP TRIGGER orphan", "DROP TABLE child", "DROP TABLE parent"):
        registry.run(statement)


def test_a_refused_creation_keeps_what_the_host_became(registry: Registry) -> None:
    """CPUs that went off are noticed once: a refusal in the same moment does not undo that."""
    world = World(registry, fail=Fail.STRICT)
    world.host.topology = flat(4)
    pod = _pod("greedy", "exclusive")
    with pytest.raises(CreationRefused):
        world.tell(CREATE, pod, _app("greedy", 64))
    assert world.allocator.state.cpus == cpus("0-3")


NOISE = _pod("noise", kata=False)


REMOVE, START, STARTED = (
    EventKind.REMOVE_CONTAINER,
    EventKind.START_CONTAINER,
    EventKind.POST_START_CONTAINER,
)


def _run(world: World, pod: Pod, container: PodContainer) -> NriAnswer:
    """Create and start a container; return the answer to the creation."""
    answer = world.make(pod, container)
    running = replace(_with(container, answer.adjust), state=ContainerState.RUNNING)
    world.tell(STARTED, pod, running)
    return answer


def _again(container: PodContainer, number: int) -> PodContainer:
    """Return the next instance of a container."""
    return replace(container, id=f"{container.id}-{number}")


def _named(pod: str, name: str, limit: int) -> PodContainer:
    return replace(_app(pod, limit), id=f"c-{pod}-{name}", name=name)


def test_a_sidecar_keeps_its_cpus(world: World) -> None:
    """It runs while the next container is created; it restarts as any other container does."""
    spec = PodSpec({KEY: "exclusive"}, frozenset({"setup"}))
    world.allocator.set_specs({"uid-db": spec})
    pod, proxy = _pod("db", "exclusive"), _named("db", "proxy", 1)
    own = _run(world, pod, proxy).adjust.cpus
    world.tell(STOP, pod, proxy)  # just now, when the app is created
    app = _run(world, pod, _named("db", "app", 2)).adjust.cpus
    assert not app & own
    assert _run(world, pod, _again(proxy, 1)).adjust.cpus == own
    assert world.allocator.state.exclusive == own | app


def test_a_container_of_the_pool_takes_no_cpus_from_its_pod(world: World) -> None:
    """Where nobody lists pods, one without CPUs of its own may be there before a restart ends."""
    pod, app = _pod("db", "exclusive"), _named("db", "app", 2)
    own = _run(world, pod, app).adjust.cpus
    world.tell(STOP, pod, app)
    _run(world, pod, _named("db", "log", 0))
    assert world.allocator.state.exclusive == own
    assert _run(world, pod, _again(app, 1)).adjust.cpus == own


def test_pod_level_resources_are_shared(registry: Registry) -> None:
    """As the real kubelet's static policy, `static` gives such pods nothing exclusive."""
    world = World(registry, policy="static", eligibility=Eligibility.KUBELET)
    pod = replace(_pod("db", kata=False), cgroups_path="/kubepods/pod-db")
    one = replace(_app("db", 2), cgroups_path="/kubepods/pod-db/c-db")
    _run(world, pod, one)
    assert len(world.allocator.state.exclusive) == 2
    world.allocator.set_specs({"uid-db": PodSpec(pod_level=True)})
    assert world.allocator.state.exclusive == CpuSet()
    (reason,) = world.allocator.state.grants["c-db"].reasons
    assert "pod-level" in reason
    other = replace(_again(one, 1), name="side")
    world.allocator.set_specs({})  # another list, in which it is missing for once
    assert world.make(pod, other).adjust.cpus
    assert len(world.allocator.state.exclusive) == 2  # nothing is known of that container's pod


def test_the_devices_of_a_container_are_located(registry: Registry, tmp_path: Path) -> None:
    """Where they are is part of what it requests, also when the runtime lists it again."""
    (tmp_path / "sys/devices/pci0000:3a/0000:3b:00.0/nvme0n1").mkdir(parents=True)
    (tmp_path / "sys/devices/pci0000:3a/0000:3b:00.0/numa_node").write_text("1\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    link = tmp_path / "sys/dev/block/259:0"
    link.symlink_to("../../devices/pci0000:3a/0000:3b:00.0/nvme0n1")
    devices = HostDevices(HostRoot(str(tmp_path)))
    world = World(registry)
    world.allocator.devices = devices
    pod, app = _pod("web"), _app("web", devices=(DeviceNode("/dev/data", "b", 259, 0),))
    world.make(pod, app)
    disk = AttachedDevice("/dev/data", "0000:3b:00.0", 1)
    assert world.allocator.state.grants["c-web"].request.devices == (disk,)
    again = World(registry)
    again.allocator.devices = devices
    again.decider.adopt(Snapshot((pod,), (_with(app, Cpuset()),)))
    assert again.allocator.state.grants["c-web"].request.devices == (disk,)


def test_a_device_of_many_containers_is_located_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime waits for the answer to Synchronize."""
    located: list[DeviceNode] = []

    def locate(_: HostRoot, device: DeviceNode) -> AttachedDevice:
        located.append(device)
        return AttachedDevice(device.path)

    monkeypatch.setattr(adjustments, "locate", locate)
    fuse = DeviceNode("/dev/fuse", "c", 10, 229)
    pods = (_pod("web"), _pod("db"))
    apps = tuple(_with(_app(pod.id, devices=(fuse,)), Cpuset()) for pod in pods)
    world.decider.adopt(Snapshot(pods, apps))
    grants = world.allocator.state.grants
    assert all(grants[app.id].request.devices == (AttachedDevice("/dev/fuse"),) for app in apps)
    assert located == [fuse]
