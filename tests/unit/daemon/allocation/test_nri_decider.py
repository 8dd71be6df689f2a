"""What NRI is answered: adjustments, updates of others, refusals, and what is left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.config.alloc import Fail
from kata_pin.config.tree import Mode
from kata_pin.daemon.allocation import pass_view
from kata_pin.daemon.allocation.nri_decider import OTHERS, NriDecider
from kata_pin.daemon.allocation.pending_passes import PendingPasses
from kata_pin.daemon.allocation.plugin_conflicts import PODS
from kata_pin.daemon.intake.nri_events import NOTHING, NriIntake
from kata_pin.daemon.reconcile.kata_pinning import KataPinningReader
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import StateError, VmmError
from kata_pin.host.process import ProcessIndex
from kata_pin.model.alloc import Guarantee, PodSpec
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.model.settings import CpuClass, Eligibility
from kata_pin.sources.nri_ports import CreationRefused
from kata_pin.vmm.find import VmmFinder
from kata_pin.wire.nri.messages import Event, EventKind, Pod, PodContainer, Snapshot
from kata_pin.wire.nri.replies import Answer, Cpuset
from kata_pin.wire.oci import CpuResources
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
            sandboxes=lambda _known: dict.fromkeys(self.kata, QEMU),
            is_claimed=lambda _id, _pids: False,
        )
        index = SimpleNamespace(refresh=lambda: None)
        pins = SimpleNamespace(take_annotations=lambda _id, _annotations: None)
        self.awaited: list[str] = []
        sandboxes = SimpleNamespace(
            vmms={},
            cache=lambda _id: None,
            mark=lambda *_: 1,
            ids=("web", "db"),
            settled=self._settled,
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

    def tell(self, kind: EventKind, pod: Pod, container: PodContainer, **fields: Any) -> Answer:
        """Have an event answered, or only taken if it needs no answer."""
        self._stamp += 1
        event = Event(kind, pod, container, **fields)
        if kind in (CREATE, UPDATE, STOP):
            return self.decider.decide(event, self._stamp)
        self.decider.take(event, self._stamp)
        return Answer()

    def make(self, pod: Pod, container: PodContainer) -> Answer:
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
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield one
    one.close()


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


def _updates(answer: Answer) -> dict[str, str]:
    return {one.container_id: str(one.cpuset.cpus) for one in answer.updates}


def test_exclusive_cpus_leave_everybody_else(world: World) -> None:
    """The creation is adjusted, and the same answer takes the CPUs from the others; then back."""
    plain = world.make(_pod("web", kata=False), _app("web"))
    assert plain.adjust.cpus == CpuSet(range(8))
    own = world.make(_pod("db", "exclusive"), _app("db", 2))
    assert len(own.adjust.cpus) == 2
    rest = CpuSet(range(8)) - own.adjust.cpus
    assert _updates(own) == {"c-web": str(rest)}
    assert not any(update.must for update in own.updates)
    over = world.tell(STOP, _pod("db"), _app("db", 2))
    assert _updates(over) == {"c-web": "0-7"}


def test_a_kata_container_without_a_quota_gets_no_cpuset(world: World) -> None:
    """Neither at creation nor by any later answer, whatever becomes of the pools (D14)."""
    answers = [world.make(_pod("web"), _app("web"))]
    answers.append(world.make(_pod("db", "exclusive"), _app("db", 2)))
    answers.append(world.tell(STOP, _pod("db"), _app("db", 2)))
    assert not answers[0].adjust
    assert all("c-web" not in _updates(one) for one in answers)
    assert world.allocator.state.get("c-web") is not None


def test_the_creation_is_recorded_with_the_decision(world: World) -> None:
    """A Kata container's record is there with its grant; another runtime's has none."""
    world.make(_pod("db", "exclusive"), _app("db", 2))
    record = world.registry.container("c-db")
    assert record is not None
    assert (record.state, record.source) == (ContainerState.CREATED, "nri:CreateContainer")
    world.make(_pod("web", kata=False), _app("web"))
    assert world.registry.container("c-web") is None
    world.tell(STOP, _pod("db"), _app("db", 2))
    stopped = world.registry.container("c-db")
    assert stopped is not None
    assert stopped.state is ContainerState.STOPPED


def test_a_strict_refusal(registry: Registry) -> None:
    """A container that cannot be served is refused with the reason, and leaves nothing behind."""
    world = World(registry, fail=Fail.STRICT)
    with pytest.raises(CreationRefused, match="CPUs"):
        world.tell(CREATE, _pod("db", "exclusive"), _app("db", 64))
    assert registry.container("c-db") is None
    assert world.allocator.state.get("c-db") is None
    assert world.ledger.pending(world.allocator.state) == {}


def test_best_effort_runs_in_the_shared_pool(world: World) -> None:
    """Without strict it gets the shared pool's cpuset."""
    answer = world.make(_pod("db", "exclusive"), _app("db", 64))
    assert answer.adjust.cpus == CpuSet(range(8))


def test_a_foreign_cpuset_is_not_replaced(world: World) -> None:
    """A container that came with a cpuset keeps it: setting it twice is a conflict."""
    container = _with(_app("db", 2), Cpuset(cpus("3-4")))
    answer = world.make(_pod("db", "exclusive"), container)
    assert answer == Answer()
    world.make(_pod("web", kata=False), _app("web"))
    assert _updates(world.tell(STOP, _pod("web", kata=False), _app("web"))) == {}


def test_kubelet_static_is_observed(world: World) -> None:
    """While the kubelet decides every answer is the observer's."""
    world.make(_pod("web", kata=False), _app("web", 1))
    world.allocator.set_orders({"shop/web": CpuClass.EXCLUSIVE})
    assert world.ledger.pending(world.allocator.state) != {}
    world.host.kubelet = KubeletState("static", cpus("0-1"))
    assert world.make(_pod("db", "exclusive"), _app("db", 2)) == Answer()
    stopped = PodContainer("c-other", "web")
    assert world.tell(STOP, _pod("web", kata=False), stopped) == Answer()


def test_a_creation_that_failed_is_not_adjusted_again(world: World) -> None:
    """A plugin behind us may have set the same: the next try of that container goes through."""
    pod, first = _pod("db", "exclusive"), _app("db", 2)
    assert world.tell(CREATE, pod, first).adjust
    world.tell(STOP, pod, first)
    second = replace(first, id="c-db-2")
    assert not world.make(pod, second).adjust
    other = world.make(_pod("db2", "exclusive"), _app("db2", 2))
    assert other.adjust


def test_one_tenants_failures_end_nothing(world: World) -> None:
    """Pods whose creation fails repeatedly do not stop the allocator for others."""
    for number in range(PODS):
        pod = _pod(f"db{number}", "exclusive")
        for attempt in range(8):
            one = replace(_app(f"db{number}", 1), id=f"c-{number}-{attempt}")
            answer = world.tell(CREATE, pod, one)
            assert bool(answer.adjust) is (attempt % 2 == 0)
            world.tell(STOP, pod, one)
    assert world.allocator.suspended == ""
    assert world.make(_pod("web", kata=False), _app("web")).adjust


def test_conflicts_end_adjusting(world: World) -> None:
    """Pods that are created only without us, with another's cpuset: none is adjusted then.

    Until the runtime has told everything anew.
    """
    for number in range(PODS):
        _conflict(world, f"db{number}", f"n{number}")
    assert "asked after kata-pin" in world.allocator.suspended
    assert not world.make(_pod("web", kata=False), _app("web")).adjust
    world.decider.adopt(Snapshot())
    assert world.make(_pod("web2", kata=False), _app("web2")).adjust


def _conflict(world: World, name: str, namespace: str) -> None:
    pod, first = replace(_pod(name, "exclusive"), namespace=namespace), _app(name, 1)
    assert world.tell(CREATE, pod, first).adjust
    world.tell(STOP, pod, first)
    again = replace(first, id=f"{first.id}-2")
    assert world.tell(CREATE, pod, again) == Answer()
    world.tell(EventKind.POST_CREATE_CONTAINER, pod, _with(again, Cpuset(cpus("1"))))


def test_beside_a_known_plugin_strict_is_refused(registry: Registry) -> None:
    """A container that rather fails than goes without its CPUs is not tried in vain."""
    world = World(registry)
    for number in range(PODS):
        _conflict(world, f"db{number}", f"n{number}")
    wants = _pod("db", "exclusive")
    wants.annotations["cpu-policy-fail.kata-pin.io"] = "strict"  # type: ignore[index]
    with pytest.raises(CreationRefused, match="another NRI plugin"):
        world.tell(CREATE, wants, _app("db", 1))


def test_a_cpuset_from_before_is_no_conflict(world: World) -> None:
    """A next try that comes with a cpuset is no evidence of a later plugin."""
    pod, first = _pod("db", "exclusive"), _app("db", 1)
    world.tell(CREATE, pod, first)
    world.tell(STOP, pod, first)
    world.make(pod, _with(replace(first, id="c-db-2"), Cpuset(cpus("1"))))
    assert (world.allocator.conflicts.conflicts, world.allocator.conflicts.given) == (0, 1)


def test_who_was_left_alone_for_nothing(world: World) -> None:
    """A container that failed once by itself has its CPUs once it is made, with the next answer."""
    pod, first = _pod("db", "exclusive"), _app("db", 2)
    world.tell(CREATE, pod, first)
    world.tell(STOP, pod, first)
    assert not world.make(pod, replace(first, id="c-db-2")).adjust
    own = world.allocator.state.exclusive
    assert len(own) == 2
    other = world.make(_pod("web", kata=False), _app("web"))
    assert _updates(other) == {"c-db-2": str(own)}
    assert other.adjust.cpus == CpuSet(range(8)) - own


def test_a_start_that_fails_is_no_conflict(world: World) -> None:
    """A container that was created and never started is no evidence of other plugins."""
    pod, first = _pod("db", "exclusive"), _app("db", 2)
    world.make(pod, first)
    world.tell(STOP, pod, first)
    assert world.make(pod, replace(first, id="c-db-2")).adjust


def test_a_resize_keeps_and_grows(world: World) -> None:
    """UpdateContainer with another limit changes the container itself in the same answer."""
    pod, one = _pod("db", "exclusive"), _app("db", 2)
    had = world.make(pod, one).adjust.cpus
    asked = CpuResources(quota_us=300_000, shares=3072)
    answer = world.tell(UPDATE, pod, _with(one, Cpuset(had)), asked=asked)
    now = CpuSet.parse(_updates(answer)["c-db"])
    assert len(now) == 3
    assert had < now


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
        assert world.tell(UPDATE, web, app, asked=asked) == Answer()
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
    ticket = world.decider.take(start, 5000)
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
    assert world.decider.take(Event(EventKind.START_CONTAINER, pod, app), 5000) == NOTHING


def test_an_owner_leaves_before_others_come(world: World) -> None:
    """Others get a Kata container's former CPUs after the pass over it, narrowing first."""
    world.make(_pod("web", kata=False), _app("web"))
    world.make(_pod("db", "exclusive"), _app("db", 4))
    had = _own(world, "c-db")
    resize = CpuResources(quota_us=200_000, period_us=100_000, shares=2048)
    answer = world.tell(UPDATE, _pod("db", "exclusive"), _app("db", 4), asked=resize)
    gone = had - _own(world, "c-db")
    assert len(gone) == 2
    assert "c-web" not in _updates(answer)
    assert world.allocator.grants.held_back == gone
    world.allocator.grants.left("db")
    assert world.allocator.grants.held_back == CpuSet()
    web = world.ledger.pending(world.allocator.now)["c-web"].cpus
    assert web == CpuSet(range(8)) - _own(world, "c-db")


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


def test_an_order_is_delivered_by_the_next_answer(world: World) -> None:
    """A class ordered between two answers is pending until the runtime calls again."""
    pod, one = _pod("db"), _app("db", 2)
    shared = world.make(pod, one).adjust.cpus
    world.tell(EventKind.START_CONTAINER, pod, _with(one, Cpuset(shared)))
    world.allocator.set_orders({"shop/db": CpuClass.EXCLUSIVE})
    own = world.allocator.state.exclusive
    assert world.ledger.pending(world.allocator.state) == {"c-db": Cpuset(own)}
    answer = world.make(_pod("web", kata=False), _app("web"))
    assert _updates(answer) == {"c-db": str(own)}


def test_an_override_by_id_holds_for_any_pod(world: World) -> None:
    """Also for a running pod without a VM, and when annotations are read afterwards."""
    world.make(_pod("web", kata=False), _app("web", 1))
    world.allocator.set_orders({"web": CpuClass.SHARE})
    assert world.allocator.state.grants["c-web"].cpu_class is CpuClass.SHARE
    world.allocator.set_specs({})
    assert world.allocator.state.grants["c-web"].cpu_class is CpuClass.SHARE


def test_synchronize_brings_everything_in_line(world: World) -> None:
    """What runs is taken in: Kata's and others', each with the cpuset that it is to have."""
    world.kata = {"db"}
    snapshot = Snapshot(
        (_pod("db", "exclusive"), _pod("web", kata=False), _pod("free")),
        (
            _with(_app("db", 2), Cpuset(cpus("4-5"))),
            _app("web"),
            _app("free"),
            _app("stray"),
        ),
    )
    updates = {one.container_id: str(one.cpuset.cpus) for one in world.decider.adopt(snapshot)}
    assert updates == {"c-web": "0-3,6-7"}
    assert world.allocator.state.exclusive == cpus("4-5")
    assert world.guarantee.value == Guarantee.NODE.value
    assert {one.container_id for one in world.allocator.grants.containers()} == {
        *("c-db", "c-web"),
        "c-free",
    }
    world.decider.ended()
    assert world.guarantee.value == Guarantee.SANDBOXES.value
    assert world.ledger.pending(world.allocator.state) == {}


def test_a_record_before_synchronize(world: World) -> None:
    """A container first reported by Kata's state has its annotation once the runtime reports it."""
    record = Container(
        "c-db", "db", state=ContainerState.RUNNING, pod_name="db", pod_namespace="shop",
        pod_uid="uid-db", quota_us=100_000, period_us=100_000, shares=1024, name="app",
    )  # fmt: skip
    world.registry.adopt(record)
    pass_view.view(world.allocator, (record,))
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
    pass_view.view(world.allocator, (record,))
    had = world.allocator.state.exclusive
    assert len(had) == 1
    world.decider.adopt(Snapshot((_pod("web", kata=False),), (_app("web"),)))
    assert world.allocator.state.exclusive == had


def test_the_end_of_a_pod_gives_everything_back(world: World) -> None:
    """StopPodSandbox counts for all its containers, were no StopContainer to come."""
    pod = _pod("db", "exclusive")
    world.make(pod, _app("db", 2))
    world.decider.take(Event(EventKind.STOP_POD_SANDBOX, pod), 5000)
    assert world.allocator.state.exclusive == CpuSet()


def test_the_end_of_an_old_sandbox_leaves_the_new_one_its_cpus(world: World) -> None:
    """Both have the pod's uid: what the new sandbox's container has stays its own."""
    old, new = (replace(_pod(name, "exclusive", kata=False), uid="uid") for name in ("old", "new"))
    world.make(old, _app("old", 2))
    world.tell(STOP, old, _app("old", 2))
    world.make(new, _app("new", 2))
    owned = world.allocator.state.grants["c-new"].exclusive
    assert len(owned) == 2
    world.decider.take(Event(EventKind.REMOVE_POD_SANDBOX, old), 5000)
    assert world.allocator.state.grants["c-new"].exclusive == owned
    world.decider.take(Event(EventKind.REMOVE_POD_SANDBOX, new), 6000)
    assert not world.allocator.state.grants


def test_what_is_not_stored_is_not_delivered(world: World) -> None:
    """A commit that fails leaves the creation as it was: others are updated with the next one."""
    world.make(_pod("web", kata=False), _app("web"))
    pod, one = _pod("db", "exclusive", kata=False), _app("db", 2)
    with failing_commits(world.registry), pytest.raises(StateError):
        world.tell(CREATE, pod, one)
    assert world.allocator.state.exclusive == CpuSet()
    assert not world.ledger.knows("c-db")
    assert world.ledger.pending(world.allocator.state) == {}
    again = world.tell(CREATE, pod, one)
    assert _updates(again) == {"c-web": str(CpuSet(range(8)) - again.adjust.cpus)}


def test_who_was_made_undecided_is_decided_then(world: World) -> None:
    """A container whose creation could not be stored is in the pools once it runs."""
    pod, one = _pod("web", kata=False), _app("web")
    with failing_commits(world.registry), pytest.raises(StateError):
        world.tell(CREATE, pod, one)
    world.tell(EventKind.POST_CREATE_CONTAINER, pod, one)
    assert world.allocator.state.grants["c-web"].cpus == CpuSet(range(8))
    other = _pod("db", "exclusive", kata=False)
    answer = world.make(other, _app("db", 2))
    assert _updates(answer) == {"c-web": str(CpuSet(range(8)) - answer.adjust.cpus)}


def test_an_end_that_is_not_stored(world: World) -> None:
    """It is taken again, as the plugin does then, and releases everything."""
    pod, one = _pod("db", "exclusive", kata=False), _app("db", 2)
    world.make(_pod("web", kata=False), _app("web"))
    world.make(pod, one)
    with failing_commits(world.registry), pytest.raises(StateError):
        world.tell(STOP, pod, one)
    assert len(world.allocator.state.exclusive) == 2
    world.decider.take(Event(STOP, pod, one), 9000)
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


def _observe(world: World) -> None:
    world.host.config = replace(world.host.config, mode=Mode.OBSERVE)


def _act(world: World) -> None:
    world.host.config = replace(world.host.config, mode=Mode.ACT)


def test_what_is_made_while_suspended_is_in_the_pools_later(world: World) -> None:
    """A container created while kata-pin observed leaves exclusive CPUs as all do."""
    _observe(world)
    assert world.make(NOISE, _app("noise")) == Answer()
    world.make(_pod("gone", kata=False), _app("gone"))
    world.tell(STOP, _pod("gone", kata=False), _app("gone"))
    _act(world)
    answer = world.make(_pod("db", "exclusive"), _app("db", 2))
    assert _updates(answer) == {"c-noise": str(CpuSet(range(8)) - answer.adjust.cpus)}
    assert "c-gone" not in world.allocator.state.grants


def test_what_is_listed_while_suspended_is_in_the_pools_later(world: World) -> None:
    """So is what Synchronize reported then; the guarantee holds for all of it."""
    _observe(world)
    world.decider.adopt(Snapshot((NOISE,), (_app("noise"),)))
    _act(world)
    answer = world.make(_pod("db", "exclusive"), _app("db", 2))
    assert set(_updates(answer)) == {"c-noise"}
    assert world.guarantee is Guarantee.NODE


def test_what_is_asked_while_suspended_counts_later(world: World) -> None:
    """Sizes reported meanwhile, also of containers with grants; overrides and classes of now."""
    db = _pod("db", "exclusive")
    world.make(db, _app("db", 2))
    _observe(world)
    world.make(_pod("web", "exclusive"), _app("web", 1))
    for pod, name in ((db, "db"), (_pod("web", "exclusive"), "web")):
        asked = CpuResources(quota_us=300_000, shares=3072)
        assert world.tell(UPDATE, pod, _app(name), asked=asked) == Answer()
    world.allocator.set_orders({"shop/web": CpuClass.SHARE})
    _act(world)
    world.allocator.follow_host()
    grants = world.allocator.state.grants
    assert len(grants["c-db"].exclusive) == 3
    assert (grants["c-web"].cpu_class, len(grants["c-web"].own)) == (CpuClass.SHARE, 3)


def test_what_is_made_beside_a_rival_is_in_the_pools_later(world: World) -> None:
    """Unless the rival gave it a cpuset, before us or behind us: that is left alone then too."""
    for number in range(PODS):
        _conflict(world, f"db{number}", f"n{number}")
    world.make(NOISE, _app("noise"))
    before, behind = _pod("before", kata=False), _pod("behind", kata=False)
    world.make(before, _with(_app("before"), Cpuset(cpus("3"))))
    assert world.tell(CREATE, behind, _app("behind")) == Answer()
    made = _with(_app("behind"), Cpuset(cpus("4")))
    world.tell(EventKind.POST_CREATE_CONTAINER, behind, made)
    world.allocator.conflicts.reconnected()
    world.make(_pod("web"), _app("web"))
    assert set(world.allocator.state.grants) >= {"c-noise", "c-web"}
    assert {"c-before", "c-behind"}.isdisjoint(world.allocator.state.grants)


def test_what_the_kubelet_gave_is_in_the_pools_later(world: World) -> None:
    """When the kubelet's static policy ends, its cpusets are replaced like any other."""
    world.host.kubelet = KubeletState("static", cpus("0-1"))
    world.make(NOISE, _with(_app("noise"), Cpuset(cpus("0-7"))))
    world.host.kubelet = None
    answer = world.make(_pod("db", "exclusive"), _app("db", 2))
    assert _updates(answer) == {"c-noise": str(CpuSet(range(8)) - answer.adjust.cpus)}


def test_what_an_ended_connection_told_is_forgotten(world: World) -> None:
    """Its end is not reported: a container that is not listed again is not in the pools."""
    _observe(world)
    world.make(NOISE, _app("noise"))
    world.decider.ended()
    _act(world)
    world.allocator.follow_host()
    assert world.allocator.state.grants == {}


def test_whoever_is_refused_is_not_tried_later(registry: Registry) -> None:
    """A container that may not be made does not come into the pools when the host changes."""
    world = World(registry, fail=Fail.STRICT)
    with pytest.raises(CreationRefused):
        world.tell(CREATE, _pod("db", "exclusive"), _app("db", 64))
    world.host.topology = flat(6)
    world.allocator.follow_host()
    assert world.allocator.state.grants == {}


REMOVE, START, STARTED = (
    EventKind.REMOVE_CONTAINER,
    EventKind.START_CONTAINER,
    EventKind.POST_START_CONTAINER,
)


def _run(world: World, pod: Pod, container: PodContainer) -> Answer:
    """Create and start a container; return the answer to the creation."""
    answer = world.make(pod, container)
    running = replace(_with(container, answer.adjust), state=ContainerState.RUNNING)
    world.tell(STARTED, pod, running)
    return answer


def _again(container: PodContainer, number: int) -> PodContainer:
    """Return the next instance of a container."""
    return replace(container, id=f"{container.id}-{number}")


@pytest.mark.parametrize("kata", [False, True])
def test_a_failing_start_takes_nothing_more(world: World, kata: bool) -> None:
    """Each try gets the CPUs of the one before; the runtime reports no end of any of them."""
    pod, app = _pod("db", "exclusive", kata=kata), _app("db", 3)
    own = world.make(pod, app).adjust.cpus
    assert len(own) == 3
    for number in range(6):
        again = _again(app, number)
        assert world.make(pod, again).adjust.cpus == own
        assert world.allocator.state.exclusive == own
        world.tell(START, pod, again)
    assert [one.container_id for one in world.allocator.grants.containers()] == ["c-db-5"]
    assert not world.ledger.knows("c-db")
    assert world.make(_pod("web", "exclusive"), _app("web", 3)).adjust


def test_a_start_that_failed_is_released_with_its_container(world: World) -> None:
    """What never had a process has nothing to come back for, once the runtime forgets it."""
    pod, app = _pod("db", "exclusive", kata=False), _app("db", 3)
    world.make(pod, app)
    world.tell(REMOVE, pod, app)
    assert world.allocator.state.grants == {}


@pytest.mark.parametrize("kata", [False, True])
def test_a_restarting_container_keeps_its_cpus(world: World, kata: bool) -> None:
    """Between two instances they are nobody else's; the next one has them, until the pod ends."""
    plain = _pod("web", kata=False)
    _run(world, plain, _app("web"))
    pod, app = _pod("db", "exclusive", kata=kata), _app("db", 2)
    own = _run(world, pod, app).adjust.cpus
    rest = CpuSet(range(8)) - own
    for number in range(3):
        assert _updates(world.tell(STOP, pod, app)) == {}
        world.tell(REMOVE, pod, app)
        assert world.allocator.state.exclusive == own
        other = _pod(f"other{number}", "exclusive", kata=False)
        greedy = _app(other.name, 6)
        assert not world.make(other, greedy).adjust.cpus & own
        world.tell(REMOVE, other, greedy)
        app = _again(app, number)
        assert _run(world, pod, app).adjust.cpus == own
    assert world.allocator.state.shared == rest
    world.tell(STOP, pod, app)
    world.decider.take(Event(EventKind.STOP_POD_SANDBOX, pod), 9000)
    assert world.allocator.state.exclusive == CpuSet()
    assert world.ledger.pending(world.allocator.state) == {"c-web": Cpuset(CpuSet(range(8)))}


def test_a_container_with_shared_cpus_keeps_nothing(world: World) -> None:
    """It follows the pool: there is nothing to keep for its next instance."""
    pod, app = _pod("web", kata=False), _app("web")
    _run(world, pod, app)
    world.tell(STOP, pod, app)
    assert world.allocator.state.grants == {}


def test_the_next_instance_asks_for_more(registry: Registry) -> None:
    """It keeps its CPUs and gets the nearest; what cannot be served strictly is refused."""
    world = World(registry, fail=Fail.STRICT)
    pod, app = _pod("db", "exclusive"), _app("db", 2)
    own = _run(world, pod, app).adjust.cpus
    world.tell(STOP, pod, app)
    with pytest.raises(CreationRefused):
        world.tell(CREATE, pod, replace(_app("db", 64), id="c-db-1"))
    assert world.allocator.state.exclusive == own
    more = world.make(pod, replace(_app("db", 4), id="c-db-2")).adjust.cpus
    assert (len(more), own <= more) == (4, True)


@pytest.mark.parametrize("living", [True, False])
def test_a_restart_of_the_daemon_between_two_instances(world: World, living: bool) -> None:
    """CPUs stay kept where the pod is listed with its process, else it has ended meanwhile."""
    pod, app = _pod("db", "exclusive", kata=False), _app("db", 2)
    own = _run(world, pod, app).adjust.cpus
    world.tell(STOP, pod, app)
    world.decider.ended()
    world.decider.adopt(Snapshot((replace(pod, pid=PAUSE if living else 0),)))
    assert world.allocator.state.exclusive == (own if living else CpuSet())
    answer = world.make(pod, _again(app, 1))
    assert len(answer.adjust.cpus) == 2


def test_a_former_instance_takes_nothing_back(world: World) -> None:
    """A pass finds both recorded as created: the newest has the CPUs, pass after pass."""
    records = tuple(
        Container(
            f"c-{number}",
            "db",
            quota_us=200_000,
            period_us=100_000,
            shares=2048,
            name="app",
            pod_name="db",
            pod_namespace="shop",
            pod_uid="uid-db",
        )
        for number in range(2)
    )
    world.allocator.set_orders({"shop/db": CpuClass.EXCLUSIVE})
    for seen in (records[:1], records, records):
        pass_view.view(world.allocator, seen)
        (grant,) = world.allocator.grants.containers()
        assert grant.container_id == seen[-1].id
        assert len(world.allocator.state.exclusive) == 2


def _named(pod: str, name: str, limit: int) -> PodContainer:
    return replace(_app(pod, limit), id=f"c-{pod}-{name}", name=name)


def _ends(world: World, pod: Pod, container: PodContainer) -> None:
    _run(world, pod, container)
    world.tell(STOP, pod, container)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("kata", [False, True])
def test_init_containers_leave_their_cpus_to_the_next(
    world: World, listed: bool, kata: bool
) -> None:
    """With the kubelet's list or without: two init containers and the app, never more than 3 CPUs.

    The rest of a larger init container's CPUs is free at once.
    """
    if listed:
        world.allocator.set_specs(
            {"uid-db": PodSpec({KEY: "exclusive"}, frozenset({"one", "two"}))}
        )
    pod = _pod("db", "exclusive", kata=kata)
    _ends(world, pod, _named("db", "one", 2))
    first = world.allocator.state.exclusive
    _ends(world, pod, _named("db", "two", 3))
    second = world.allocator.state.exclusive
    assert (len(second), first <= second) == (3, True)
    own = _run(world, pod, _named("db", "app", 1)).adjust.cpus
    assert world.allocator.state.exclusive == own
    assert own <= second


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
