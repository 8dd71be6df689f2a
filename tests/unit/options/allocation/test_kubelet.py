"""The static policy: reserving, starting, allocating, reusing, removing."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ConfigError
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.choice import take_hinted
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.allocation.policy import AllocError, AllocFailure
from tests.support.kubelet_pod import ContainerRole, KubeletContainer, KubeletPod
from tests.support.kubelet_state import StaticState
from tests.support.kubelet_static import KubeletStatic, reserved_count, status_reason
from tests.support.machines import Shape, host

EIGHT = Machine.of(host(Shape(cores=4, threads=2).cpus()))
"""4 cores of 2 threads: 0,4 1,5 2,6 3,7."""


def policy(reserve: int = 0, reserved: str = "", **options: bool) -> KubeletStatic:
    """Return a policy on the 8-CPU host."""
    return KubeletStatic.create(EIGHT, StaticOptions(**options), reserve, CpuSet.parse(reserved))


def app(name: str, cpus: int) -> KubeletContainer:
    """Return an app container that asks for whole CPUs."""
    return KubeletContainer(name, cpus * 1000, cpus * 1000)


def init(name: str, cpus: int) -> KubeletContainer:
    """Return an init container that asks for whole CPUs."""
    return KubeletContainer(name, cpus * 1000, cpus * 1000, ContainerRole.INIT)


def sidecar(name: str, cpus: int) -> KubeletContainer:
    """Return a sidecar that asks for whole CPUs."""
    return KubeletContainer(name, cpus * 1000, cpus * 1000, ContainerRole.SIDECAR)


def allocate_all(static: KubeletStatic, state: StaticState, *pods: KubeletPod) -> StaticState:
    """Allocate each container of each pod in turn."""
    for pod in pods:
        for container in pod.containers:
            state = static.allocate(state, pod, container)
    return state


def cpus_of(state: StaticState, pod: KubeletPod) -> dict[str, str]:
    """Return the cpu lists of a pod's containers."""
    return {name: str(cpus) for name, cpus in state.assignments.get(pod.uid, {}).items()}


def test_reserved_by_number() -> None:
    """2 of 8 CPUs reserved are the two threads of the first core; shared, but never given out."""
    static = policy(2)
    assert static.reserved == CpuSet.parse("0,4")
    state = static.start(StaticState())
    assert state.shared == CpuSet.parse("0-7")
    assert static.available(state) == CpuSet.parse("1-3,5-7")


def test_strict_reservation() -> None:
    """Strictly reserved CPUs are not in the shared pool either."""
    static = policy(2, strict_cpu_reservation=True)
    assert static.start(StaticState()).shared == CpuSet.parse("1-3,5-7")


def test_reserved_list_must_have_the_number() -> None:
    """A list of another size, a CPU that is not there and too many CPUs stop the start."""
    for reserve, reserved in [(1, "0-1"), (1, "9"), (9, "")]:
        with pytest.raises(ConfigError):
            policy(reserve, reserved)


def test_reserved_count() -> None:
    """Reserved CPU is rounded up to whole CPUs; none at all is refused."""
    assert reserved_count(500, 501) == 2
    with pytest.raises(ConfigError):
        reserved_count(0, 0)


@pytest.mark.parametrize(
    ("shared", "assigned", "strict"),
    [
        ("", "1", False),
        ("1-7", "", False),
        ("0-7", "", True),
        ("0-7", "7", False),
        ("0-6", "", False),
        ("0-7", "8", False),
    ],
    ids=["no-pool", "reserved-gone", "strict", "overlap", "cpu-missing", "cpu-unknown"],
)
def test_state_that_can_not_be(shared: str, assigned: str, strict: bool) -> None:
    """A found state that contradicts the host or the settings is refused."""
    assignments = {"pod": {"c": CpuSet.parse(assigned)}} if assigned else {}
    static = policy(1, "0", strict_cpu_reservation=strict)
    with pytest.raises(AllocError) as caught:
        static.start(StaticState(CpuSet.parse(shared), assignments))
    assert caught.value.failure is AllocFailure.INVALID_STATE


def test_found_state_is_kept() -> None:
    """A state that fits is taken as it is."""
    state = StaticState(CpuSet.parse("0-6"), {"pod": {"c": CpuSet.parse("7")}})
    assert policy(1, "0").start(state) is state


def test_again_is_the_same() -> None:
    """Allocating a container that has CPUs changes nothing."""
    static, pod = policy(), KubeletPod("a", (app("c", 2),))
    once = allocate_all(static, static.start(StaticState()), pod)
    assert cpus_of(once, pod) == {"c": "0,4"}
    assert allocate_all(static, once, pod) == once


def test_who_gets_exclusive_cpus() -> None:
    """Only whole CPUs in a pod of which every container is Guaranteed."""
    whole, part = app("whole", 2), KubeletContainer("part", 1500, 1500)
    mixed = KubeletPod("mixed", (whole, part))
    assert [mixed.exclusive_cpus(one) for one in mixed.containers] == [2, 0]
    for other in (
        KubeletContainer("more", 1000, 2000),
        KubeletContainer("none"),
        KubeletContainer("memory", 1000, 1000, memory_equal=False),
    ):
        assert KubeletPod("pod", (whole, other)).exclusive_cpus(whole) == 0


def test_init_containers_lend_their_cpus() -> None:
    """Later containers of the pod may take an init container's CPUs; other pods may not."""
    static = policy()
    pod = KubeletPod("a", (init("i1", 4), init("i2", 4), app("c", 2)))
    state = allocate_all(static, static.start(StaticState()), pod)
    assert cpus_of(state, pod) == {"i1": "0-1,4-5", "i2": "0-1,4-5", "c": "0,4"}
    assert state.shared == CpuSet.parse("2-3,6-7")
    other = KubeletPod("b", (app("c", 2),))
    after = allocate_all(static, state, other)
    assert cpus_of(after, other) == {"c": "2,6"}
    assert after.reusable.of("a") == EMPTY


def test_sidecars_lend_nothing() -> None:
    """A sidecar keeps running, so its CPUs are its own."""
    static, pod = policy(), KubeletPod("a", (sidecar("s", 2), app("c", 2)))
    state = allocate_all(static, static.start(StaticState()), pod)
    assert cpus_of(state, pod) == {"s": "0,4", "c": "1,5"}
    assert pod.exclusive_cpus_of_pod() == 4


def test_running_containers_are_never_reusable() -> None:
    """When an init container comes again after its app, the app's CPUs are not lent twice."""
    static = policy()
    pod = KubeletPod("a", (init("i", 2), app("c", 2), app("d", 2)))
    state = static.start(StaticState())
    for index in (0, 1, 0, 2):
        state = static.allocate(state, pod, pod.containers[index])
    assert cpus_of(state, pod) == {"i": "0,4", "c": "0,4", "d": "1,5"}


def test_removal_returns_what_nobody_else_has() -> None:
    """Of a removed container only CPUs that no sibling holds return to the shared pool."""
    static, pod = policy(), KubeletPod("a", (init("i", 4), app("c", 2)))
    state = allocate_all(static, static.start(StaticState()), pod)
    state = static.remove(state, "a", "i")
    assert state.shared == CpuSet.parse("1-3,5-7")
    state = static.remove(state, "a", "c")
    assert state.shared == CpuSet.parse("0-7")
    assert state.assignments == {}
    assert static.remove(state, "a", "c") is state


def failure(static: KubeletStatic, state: StaticState, cpus: int) -> AllocError:
    """Return the error of a request."""
    pod = KubeletPod("x", (app("c", cpus),))
    with pytest.raises(AllocError) as caught:
        static.allocate(state, pod, pod.containers[0])
    return caught.value


def test_whole_cores_only() -> None:
    """full-pcpus-only refuses odd requests, and CPUs whose core has a reserved thread."""
    static = policy(1, "0", full_pcpus_only=True)
    state = static.start(StaticState())
    odd = failure(static, state, 3)
    assert (odd.failure, status_reason(odd)) == (AllocFailure.SMT_ALIGNMENT, "SMTAlignmentError")
    assert failure(static, state, 8).failure is AllocFailure.SMT_ALIGNMENT
    pod = KubeletPod("a", (app("c", 6),))
    assert cpus_of(allocate_all(static, state, pod), pod) == {"c": "1-3,5-7"}
    apart = policy(2, "0-1", full_pcpus_only=True)
    assert failure(apart, apart.start(StaticState()), 6).failure is AllocFailure.SMT_ALIGNMENT


def test_too_much() -> None:
    """More than available is refused with the reason of untyped errors."""
    static = policy(2)
    error = failure(static, static.start(StaticState()), 7)
    assert error.failure is AllocFailure.NOT_ENOUGH_CPUS
    assert status_reason(error) == "UnexpectedAdmissionError"


FOUR_NODES = Machine.of(host(Shape(uppers=2, lowers=2, cores=4, threads=1).cpus()))


@pytest.mark.parametrize(
    ("by_socket", "free", "wanted", "expected"),
    [
        (False, "0-15", 2, "8-9"),
        (False, "0-3,8,12-15", 3, "0-1,8"),
        (True, "0-3,8,12-15", 3, "8,12-13"),
        (False, "0-3", 2, "0-1"),
    ],
    ids=["inside", "rest-from-anywhere", "rest-from-the-package", "nothing-there"],
)
def test_hint(by_socket: bool, free: str, wanted: int, expected: str) -> None:
    """Hinted nodes are drawn from first; align-by-socket widens them to their package."""
    options = StaticOptions(align_by_socket=by_socket)
    taken = take_hinted(FOUR_NODES, CpuSet.parse(free), wanted, options, CpuSet([2]))
    assert taken == CpuSet.parse(expected)


def test_hints_of_a_container_and_of_a_pod() -> None:
    """Hints come from what is available, then from what is held; a wrong size cannot be served."""
    static = KubeletStatic.create(FOUR_NODES, StaticOptions(), 0)
    pod = KubeletPod("a", (app("c", 4), app("d", 4)))
    state = static.start(StaticState())
    first = static.hints(state, pod, pod.containers[0]) or ()
    assert [str(hint.nodes) for hint in first if hint.preferred] == ["0", "1", "2", "3"]
    whole = static.pod_hints(state, pod) or ()
    assert {len(hint.nodes) for hint in whole if hint.preferred} == {2}
    state = static.allocate(state, pod, pod.containers[0], CpuSet([2]))
    held = static.hints(state, pod, pod.containers[0]) or ()
    assert all(2 in hint.nodes for hint in held)
    assert all(2 in hint.nodes for hint in static.pod_hints(state, pod) or ())
    grown = KubeletPod("a", (app("c", 5), app("d", 4)))
    assert static.hints(state, grown, grown.containers[0]) == ()
    assert static.pod_hints(state, grown) == ()
    shared = KubeletPod("s", (KubeletContainer("c", 500, 500),))
    assert static.hints(state, shared, shared.containers[0]) is None
    assert static.pod_hints(state, shared) is None


def test_pod_needs_at_once() -> None:
    """Init containers run one by one beside earlier sidecars; apps beside all sidecars."""
    pod = KubeletPod("a", (init("i", 3), sidecar("s", 2), init("j", 5), app("c", 1), app("d", 1)))
    assert pod.exclusive_cpus_of_pod() == 7
