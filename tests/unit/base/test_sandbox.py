"""Containers and sandboxes: titles, counting, names of the pod."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.base.sandbox import GuestTopology, Sandbox
from kata_pin.base.values import ContainerState
from tests.support.world import pause, shared


def test_titles() -> None:
    """A container is called by its name, the pod sandbox pause, else by a short id."""
    nameless = replace(shared("a", "1"), name="", id="0123456789abcdef")
    assert shared("app", "1").title == "app"
    assert replace(pause(None), name="").title == "pause"
    assert nameless.title == "0123456789ab"


def test_pod_and_handler_come_from_the_first_record_that_names_them() -> None:
    """The pod's name, and the handler, may be in any container's record."""
    named = replace(shared("b", None), pod_name="web", pod_namespace="prod", handler="kata")
    pod = Sandbox("s1", (shared("a", None), named))
    assert (pod.pod, pod.handler) == ("prod/web", "kata")
    assert (Sandbox("s1").pod, Sandbox("s1").handler) == ("s1", "")


def test_counting() -> None:
    """Created and running containers count, stopped ones do not."""
    records = tuple(replace(shared(state, "1"), state=state) for state in ContainerState)
    assert [one.id for one in records if one.state.counts] == ["created", "running"]


def test_guest_siblings() -> None:
    """vCPUs of one guest core share a number; no threads means none are siblings."""
    assert [GuestTopology(threads=2).siblings_of(i) for i in range(4)] == [0, 0, 1, 1]
    assert GuestTopology(threads=0).siblings_of(3) == 3


def test_who_reported_a_container_decides_nothing() -> None:
    """A later message that reports the same is no reason to decide again; other CPUs are."""
    one = shared("a", "1")
    pod = Sandbox("s1", (one,))
    again = replace(one, source="hook:poststart", recorded_ns=one.recorded_ns + 1)
    assert replace(pod, containers=(again,)).decisive == pod.decisive
    assert Sandbox("s1", (shared("a", "2"),)).decisive != pod.decisive
