"""Placement of vCPUs (D10): counts, modes, notes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.sandbox import Container, GuestTopology, ProcessKey, Thread, Vmm
from kata_pin.base.settings import PlacementSettings, VcpuMode
from kata_pin.base.values import KataRuntime, ThreadRole
from kata_pin.placement.drift import KataPinning, KataPinningMode
from kata_pin.placement.place import are_placed_alike, pairs
from tests.support.at_once import place
from tests.support.world import (
    after,
    applied,
    codes,
    exclusive,
    flat,
    main_thread,
    node,
    overhead,
    pause,
    sandbox,
    shared,
    smt_host,
    thread,
    vcpu,
    vcpus,
    without,
)

A2 = exclusive("a", "4-5")
A4 = exclusive("a", "4-7")
B2 = exclusive("b", "8-9")
S = shared("s", "0-1")


@pytest.mark.parametrize(
    ("containers", "indexes", "expected", "said"),
    [
        pytest.param(
            (A2, S),
            (0, 1, 2),
            {0: "0-1", 1: "4", 2: "5"},
            set(),
            id="n > x: vCPU 0 is surplus, the last x are paired in order",
        ),
        pytest.param(
            (A2, S),
            (0, 1, 15, 14),
            {0: "0-1", 1: "0-1", 14: "4", 15: "5"},
            set(),
            id="sparse indexes: the last x by index, not by creation",
        ),
        pytest.param((A2,), (0, 1), {0: "4", 1: "5"}, set(), id="n = x: one to one"),
        pytest.param(
            (A2, S),
            (0, 1),
            {0: "4", 1: "5"},
            {"shared-without-vcpu"},
            id="n = x with shared containers: paired, and said",
        ),
        pytest.param(
            (A2, B2),
            (0, 1, 2, 3, 4),
            {0: "4-5,8-9", 1: "4", 2: "5", 3: "8", 4: "9"},
            {"surplus-overlaps-pairs"},
            id="container by container; surplus over pairs is a note",
        ),
        pytest.param(
            (B2, A2),
            (0, 1, 2, 3),
            {0: "8", 1: "9", 2: "4", 3: "5"},
            set(),
            id="record order of containers, not CPU order",
        ),
        pytest.param(
            (A4,),
            (0, 1),
            {0: "4-5", 1: "6-7"},
            {"fewer-vcpus"},
            id="n < x: runs that do not overlap",
        ),
        pytest.param(
            (A4, S),
            (0, 1),
            {0: "0-1", 1: "4-7"},
            {"fewer-vcpus"},
            id="n < x: vCPU 0 is kept for shared containers",
        ),
        pytest.param(
            (A4, S),
            (0,),
            {0: "4-7"},
            {"fewer-vcpus", "shared-without-vcpu"},
            id="n < x: none kept when each exclusive container needs its one",
        ),
        pytest.param(
            (A4, B2, S),
            (0, 1, 2, 3),
            {0: "0-1", 1: "4-5", 2: "6-7", 3: "8-9"},
            {"fewer-vcpus"},
            id="n < x: shares are proportional and never cross a container",
        ),
        pytest.param(
            (A4, B2, S),
            (0, 1),
            {0: "4-7", 1: "8-9"},
            {"fewer-vcpus", "shared-without-vcpu"},
            id="n = number of exclusive containers: one each",
        ),
        pytest.param(
            (A4, B2, S),
            (0,),
            {0: "0-1,4-9"},
            {"fewer-vcpus-than-containers"},
            id="fewer vCPUs than exclusive containers: the whole mask",
        ),
        pytest.param(
            (S, shared("t", "2")),
            (0, 1),
            {0: "0-2", 1: "0-2"},
            set(),
            id="nothing exclusive: the sandbox mask",
        ),
        pytest.param(
            (A4, shared("best-effort", None)),
            (0, 1, 2),
            {0: "4-7", 1: "4-5", 2: "6-7"},
            {"fewer-vcpus", "surplus-overlaps-pairs"},
            id="a container without a cpuset needs a vCPU too; no shared CPU: where overhead goes",
        ),
        pytest.param(
            (pause("2-3"), A2),
            (0, 1, 2),
            {0: "2-3", 1: "4", 2: "5"},
            set(),
            id="the pause container's cpuset serves surplus vCPUs",
        ),
        pytest.param(
            (pause("2-3"), S),
            (0, 1),
            {0: "0-1", 1: "0-1"},
            set(),
            id="but not the vCPUs of containers",
        ),
        pytest.param((A2, S), (), {}, set(), id="no vCPU thread known yet"),
    ],
)
def test_pair(
    containers: tuple[Container, ...],
    indexes: tuple[int, ...],
    expected: dict[int, str],
    said: set[str],
) -> None:
    """Mode pair, by numbers of vCPUs, exclusive CPUs and containers."""
    threads = vcpus(*indexes)
    found = place(sandbox(*containers), threads, node())
    assert applied(found, threads) == {f"vcpu {i}": text for i, text in expected.items()}
    assert codes(found) == said


def test_paired_says_whose() -> None:
    """A paired vCPU names its container; a surplus one is not paired."""
    threads = vcpus(0, 1, 2)
    found = place(sandbox(A2, S), threads, node())
    assert [found.desired[one.key].container_id for one in threads] == ["", "a", "a"]
    assert [found.desired[one.key].paired for one in threads] == [False, True, True]
    assert pairs(found) == {threads[1].key: 4, threads[2].key: 5}


def test_fewer_vcpus_names_numbers_and_remedies() -> None:
    """The note says what the VM lacks and how to size it."""
    found = place(sandbox(A4), vcpus(0, 1), node())
    (note,) = found.notes
    assert note.text.startswith("the VM has 2 vCPUs for 4 exclusive CPUs; remedies: ")
    assert "default_vcpus by 3" in note.text


@pytest.mark.parametrize(
    ("runtime", "boot", "said", "unsaid"),
    [
        (KataRuntime.GO, 2, ("raise default_vcpus by 3",), ("overhead_vcpus",)),
        (
            KataRuntime.RUST,
            2,
            ("overhead_vcpus = 4.2 under [hypervisor.qemu]", "before Kubernetes 1.37 keep"),
            ("raise default_vcpus", "annotation"),
        ),
        (KataRuntime.RUST, 0, (), ("remedies", "overhead_vcpus")),
    ],
)
def test_remedies_are_those_of_the_runtime(
    runtime: KataRuntime, boot: int, said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    """What runtime-rs overwrites is no remedy; with other VMMs than QEMU nothing was tried."""
    guest = GuestTopology(boot=boot)
    vmm = Vmm("vmm", ProcessKey(1000, 1), 1, "/usr/bin/vmm", "hook", guest, runtime=runtime)
    (note,) = place(replace(sandbox(A4), vmm=vmm), vcpus(0, 1), node()).notes
    assert note.code == "fewer-vcpus"
    assert all(words in note.text for words in said)
    assert not any(words in note.text for words in unsaid)


@pytest.mark.parametrize("runtime", KataRuntime)
def test_a_copy_of_a_template_is_not_sized_by_a_class(runtime: KataRuntime) -> None:
    """runtime-rs adds nothing to a copy; the Go runtime does, as to any VM."""
    key, guest = ProcessKey(1000, 1), GuestTopology(boot=2)
    vmm = Vmm("qemu", key, 1, "/usr/bin/vmm", "hook", guest, loads=True, runtime=runtime)
    (note,) = place(replace(sandbox(A4), vmm=vmm), vcpus(0, 1), node()).notes
    assert ("set enable_template = false" in note.text) == (runtime is KataRuntime.RUST)
    assert ("raise default_vcpus" in note.text) == (runtime is KataRuntime.GO)
    assert "overhead_vcpus" not in note.text


def test_threads_that_may_be_vcpus_are_no_lack() -> None:
    """Without KVM hotplugged vCPUs are disputed threads: no advice to make the VM larger."""
    unsure = [thread(ThreadRole.EMULATOR, 20 + n, conflict="may be a vCPU") for n in range(4)]
    found = place(sandbox(A4), [*vcpus(0), *unsure], node())
    (text,) = (note.text for note in found.notes if note.code == "fewer-vcpus")
    assert text.startswith(
        "the VM has 1 vCPU and 4 threads that may be vCPUs for 4 exclusive CPUs; remedies: "
        'to have its threads identified, set enable_debug = true and extra_monitor_socket = "qmp"'
    )
    assert "default_vcpus" not in text
    found = place(sandbox(A4), [*vcpus(0), *unsure[:2]], node())
    (text,) = (note.text for note in found.notes if note.code == "fewer-vcpus")
    assert "raise default_vcpus by 2" in text  # what is missing whatever those two are


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        pytest.param(VcpuMode.FLOAT, {"vcpu 0": "0-1,4-5", "vcpu 1": "0-1,4-5"}, id="float"),
        pytest.param(VcpuMode.LEAVE, {}, id="leave"),
    ],
)
def test_other_modes(mode: VcpuMode, expected: dict[str, str]) -> None:
    """`float` puts every vCPU on the mask, `leave` touches none; overhead is placed in both."""
    threads = [*vcpus(0, 1), main_thread()]
    found = place(sandbox(A2, S), threads, node(settings=PlacementSettings(vcpus=mode)))
    assert applied(found, threads) == expected | {"emulator": "0-1"}


def test_float_does_not_use_the_pause_containers_cpus() -> None:
    """The pod sandbox's own cpuset is for overhead and surplus vCPUs only (D8)."""
    threads = vcpus(0)
    settings = PlacementSettings(vcpus=VcpuMode.FLOAT)
    found = place(sandbox(pause("8-9"), S), threads, node(settings=settings))
    assert applied(found, threads) == {"vcpu 0": "0-1"}


def test_topology_order_on_smt() -> None:
    """Pairs follow node, package, LLC, core and thread: siblings stand beside each other."""
    threads = vcpus(0, 1, 2, 3)
    found = place(sandbox(exclusive("a", "2-3,10-11")), threads, node(smt_host()))
    assert applied(found, threads) == {
        "vcpu 0": "2",
        "vcpu 1": "10",
        "vcpu 2": "3",
        "vcpu 3": "11",
    }


def test_unknown_index_is_first_to_be_surplus() -> None:
    """A vCPU without an index is counted, said, and takes no pair while others can."""
    threads = [vcpu(None, tid=1500), *vcpus(0, 1)]
    found = place(sandbox(A2, S), threads, node())
    assert applied(found, threads) == {"vcpu ?": "0-1", "vcpu 0": "4", "vcpu 1": "5"}
    assert codes(found) == {"vcpu-index-unknown"}


def test_only_unknown_indexes_go_by_age() -> None:
    """With no index at all the oldest vCPUs are surplus first, and the rest are still paired."""
    threads = [vcpu(None, tid=tid) for tid in (1503, 1501, 1502)]
    found = place(sandbox(A2, S), threads, node())
    assert {one.key.tid: str(found.desired[one.key].applied) for one in threads} == {
        1501: "0-1",
        1502: "4",
        1503: "5",
    }


def test_disputed_role_takes_the_whole_mask() -> None:
    """A vCPU whose sources contradict each other is not paired, and does not count as one."""
    threads = [vcpu(1, conflict="debugfs says 1, QMP says 2"), *vcpus(0, 2, 3)]
    found = place(sandbox(A2, S), threads, node())
    assert applied(found, threads) == {
        "vcpu 0": "0-1",
        "vcpu 1": "0-1,4-5",
        "vcpu 2": "4",
        "vcpu 3": "5",
    }
    assert codes(found) == {"role-conflict"}


def test_two_threads_of_one_index_take_the_whole_mask() -> None:
    """Two threads can not both be vCPU 1: neither is believed."""
    doubles = [vcpu(1, tid=1501), vcpu(1, tid=1502)]
    threads = [*doubles, *vcpus(0, 2)]
    found = place(sandbox(A2), threads, node())
    assert {str(found.desired[one.key].applied) for one in doubles} == {"4-5"}
    assert applied(found, threads[2:]) == {"vcpu 0": "4", "vcpu 2": "5"}
    assert codes(found) == {"role-conflict"}


def test_the_same_thread_twice_is_one() -> None:
    """A thread that was listed twice is placed once."""
    threads = vcpus(0, 1)
    found = place(sandbox(A2), [*threads, *threads], node())
    assert applied(found, threads) == {"vcpu 0": "4", "vcpu 1": "5"}
    assert codes(found) == set()


def test_offline_exclusive_cpu() -> None:
    """An exclusive CPU that is off is not paired; x is what is left, and it is said."""
    threads = vcpus(0, 1)
    found = place(sandbox(A2), threads, node(without(flat(16), "4")))
    assert applied(found, threads) == {"vcpu 0": "5", "vcpu 1": "5"}
    assert [found.desired[one.key].paired for one in threads] == [False, True]
    assert codes(found) == {"exclusive-offline", "surplus-overlaps-pairs"}


def test_overlapping_exclusive_sets_pair_a_cpu_once() -> None:
    """Two containers that claim one CPU get it once, in record order, and it is said."""
    threads = vcpus(0, 1, 2)
    found = place(sandbox(exclusive("a", "4-5"), exclusive("b", "5-6")), threads, node())
    assert applied(found, threads) == {"vcpu 0": "4", "vcpu 1": "5", "vcpu 2": "6"}
    assert "exclusive-overlap" in codes(found)


def test_surplus_follows_the_overhead_setting() -> None:
    """Surplus vCPUs go where overhead goes, also by a setting for the role vcpu."""
    threads = [*vcpus(0, 1, 2), main_thread()]
    settings = PlacementSettings(overhead_roles={ThreadRole.VCPU: overhead("10-11")})
    found = place(sandbox(A2, S), threads, node(settings=settings))
    assert applied(found, threads)["vcpu 0"] == "10-11"
    assert applied(found, threads)["emulator"] == "0-1"
    assert codes(found) == {"shared-on-overhead"}


def test_surplus_can_be_left_alone() -> None:
    """`leave` for the role vcpu leaves surplus vCPUs and pairs the others."""
    threads = vcpus(0, 1, 2)
    settings = PlacementSettings(overhead_roles={ThreadRole.VCPU: overhead("leave")})
    found = place(sandbox(A2, S), threads, node(settings=settings))
    assert applied(found, threads) == {"vcpu 1": "4", "vcpu 2": "5"}


@pytest.mark.parametrize(
    ("kata", "indexes", "yields"),
    [
        pytest.param(KataPinningMode.OFF, (0, 1), False, id="no Kata pinning"),
        pytest.param(KataPinningMode.COUNT, (0, 1), True, id="as many vCPUs as CPUs"),
        pytest.param(
            KataPinningMode.COUNT, (0, 1, 2), False, id="one vCPU more: Kata does nothing"
        ),
        pytest.param(KataPinningMode.NUMA, (0, 1, 2), True, id="Kata's NUMA mode"),
    ],
)
def test_yielding_to_kata(kata: KataPinningMode, indexes: tuple[int, ...], yields: bool) -> None:
    """The vCPUs are left to Kata only while its own rule holds; overhead never is (D13)."""
    threads = [*vcpus(*indexes), main_thread()]
    found = place(sandbox(A2), threads, node(), kata=KataPinning(kata, "persist.json"))
    assert (threads[0].key not in found.desired) is yields
    assert main_thread().key in found.desired
    assert ("kata-pins-vcpus" in codes(found)) is yields
    rests = kata is KataPinningMode.COUNT and not yields
    assert ("kata-may-pin" in codes(found)) is rests
    assert all("persist.json" in one.text for one in found.notes if one.code.startswith("kata-"))


def test_containers_share_vcpus_that_kata_pins() -> None:
    """Kata confines none in the guest: `exclusive` does not hold there, which is said."""
    kata = KataPinning(KataPinningMode.COUNT, "state.json")
    texts = [
        next(one.text for one in place(pod, vcpus(*range(n)), node(), kata=kata).notes)
        for pod, n in ((sandbox(A2, S), 4), (sandbox(A2), 2))
    ]
    assert "in the guest container a, container s run on every vCPU" in texts[0]
    assert texts[1].endswith("kata-pin does not")


def test_kata_counts_the_pause_containers_cpus() -> None:
    """Kata's union includes the pod sandbox's own cpuset, so its rule is judged with it."""
    threads = vcpus(0, 1)
    found = place(sandbox(pause("8"), A2), threads, node(), kata=KataPinning(KataPinningMode.COUNT))
    assert set(found.desired) == {one.key for one in threads}


def observed(threads: list[Thread], where: dict[int, str]) -> list[Thread]:
    """Return vCPU threads with these one-CPU masks by index."""
    by_index = {one.role.vcpu: one for one in vcpus(*(one.role.vcpu or 0 for one in threads))}
    for index, text in where.items():
        by_index[index] = vcpu(index, on=text)
    return list(by_index.values())


@pytest.mark.parametrize(
    ("kept", "seen", "indexes", "expected"),
    [
        pytest.param({1: 5, 2: 4}, {}, (0, 1, 2), {1: "5", 2: "4"}, id="kept from the registry"),
        pytest.param({}, {1: "5"}, (0, 1, 2), {1: "5", 2: "4"}, id="else kept as observed"),
        pytest.param(
            {1: 4}, {1: "5"}, (0, 1, 2), {1: "4", 2: "5"}, id="the registry before the observed"
        ),
        pytest.param(
            {2: 4}, {1: "4"}, (0, 1, 2), {1: "5", 2: "4"}, id="a registered pair before another's"
        ),
        pytest.param(
            {1: 4, 2: 4}, {}, (0, 1, 2), {1: "4", 2: "5"}, id="two registered on one: the first"
        ),
        pytest.param({1: 9}, {}, (0, 1, 2), {1: "4", 2: "5"}, id="illegal: not exclusive"),
        pytest.param(
            {0: 5}, {}, (0, 1, 2), {1: "4", 2: "5"}, id="illegal: that vCPU is surplus now"
        ),
        pytest.param(
            {1: 7000}, {1: "9"}, (0, 1, 2), {1: "4", 2: "5"}, id="absurd numbers are ignored"
        ),
        pytest.param(
            {0: 4, 15: 5}, {}, (0, 14, 15), {14: "4", 15: "5"}, id="hotplug moves vCPU 0 only"
        ),
    ],
)
def test_legal_pairs_are_kept(
    kept: dict[int, int], seen: dict[int, str], indexes: tuple[int, ...], expected: dict[int, str]
) -> None:
    """The first claim: a pair that exists and is legal stays."""
    threads = observed(vcpus(*indexes), seen)
    by_index = {one.role.vcpu: one.key for one in threads}
    registry = {by_index[index]: cpu for index, cpu in kept.items()}
    found = place(sandbox(A2, S), threads, node(), kept=registry)
    wanted = {f"vcpu {index}": text for index, text in expected.items()}
    assert applied(found, threads) == wanted | {f"vcpu {indexes[0]}": "0-1"}


def test_runs_are_kept_by_any_of_their_cpus() -> None:
    """With fewer vCPUs than CPUs a vCPU keeps the run that has its registered CPU."""
    threads = vcpus(0, 1)
    found = place(sandbox(A4), threads, node(), kept={threads[0].key: 7})
    assert applied(found, threads) == {"vcpu 0": "6-7", "vcpu 1": "4-5"}


def test_a_run_stays_meant_for_a_vcpu_that_can_not_have_it() -> None:
    """Where cgroups keep vCPUs from their CPUs, the next pass does not deal the CPUs anew."""
    threads = [vcpu(0, cpuset="5"), vcpu(1, cpuset="6")]
    first = place(sandbox(A2), threads, node())
    assert pairs(first) == {threads[0].key: 4, threads[1].key: 5}
    assert place(sandbox(A2), after(first, threads), node(), kept=pairs(first)) == first


def test_a_reused_tid_keeps_nothing() -> None:
    """Identity is (tgid, tid, starttime): a later thread of the same tid has no old pair."""
    threads = vcpus(0, 1)
    old = threads[0].key._replace(starttime=1)
    found = place(sandbox(A2), threads, node(), kept={old: 5})
    assert applied(found, threads) == {"vcpu 0": "4", "vcpu 1": "5"}


@pytest.mark.parametrize(
    ("before", "plugged", "expected"),
    [
        pytest.param(
            (0, 1, 2), (15,), {0: "0-1", 1: "4", 2: "5", 15: "0-1"}, id="a new vCPU is surplus"
        ),
        pytest.param((0, 1), (15,), {0: "0-1", 1: "5", 15: "4"}, id="vCPU 0 gives its pair up"),
    ],
)
@pytest.mark.parametrize("registry", [True, False], ids=["registry", "observed masks"])
def test_a_hotplugged_vcpu_moves_no_pair(
    before: tuple[int, ...], plugged: tuple[int, ...], expected: dict[int, str], *, registry: bool
) -> None:
    """Legal pairs are kept before the last vCPUs by index are chosen; vCPU 0 is surplus first."""
    pod = sandbox(A2, S)
    first = place(pod, vcpus(*before), node())
    standing = [*after(first, vcpus(*before)), *vcpus(*plugged, on="0-1")]
    kept = pairs(first) if registry else {}
    found = place(pod, standing, node(), kept=kept)
    assert {one.role.vcpu: str(found.desired[one.key].applied) for one in standing} == expected


def test_a_pair_that_is_lost_makes_the_affinity_relevant() -> None:
    """A vCPU whose pair has gone may stay on the CPU that it is seen on: that decides then."""
    pod, kept = sandbox(exclusive("own", "4-5")), {vcpu(0).key: 2, vcpu(1).key: 3}
    here, there = ([vcpu(0, on=one), vcpu(1, on=two)] for one, two in (("4", "5"), ("5", "4")))
    found = place(pod, here, node(), kept=kept)
    assert found != place(pod, there, node(), kept=kept)
    assert not are_placed_alike(here, there, flat(16), found, kept)


def test_where_every_pair_is_kept_no_affinity_is_relevant() -> None:
    """Threads that another writer scattered, or pinned, are placed as before without deciding."""
    pod = sandbox(exclusive("own", "4-5"), S)
    here, there = ([vcpu(n, on=cpus) for n in range(3)] for cpus in ("0-7", "5"))
    found = place(pod, here, node())
    kept = pairs(found)
    assert place(pod, there, node(), kept=kept) == place(pod, here, node(), kept=kept) == found
    assert are_placed_alike(here, there, flat(16), found, kept)
    assert not are_placed_alike(here, there, flat(16), found, {})
