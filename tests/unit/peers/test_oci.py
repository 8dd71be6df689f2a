"""The state on a hook's stdin and config.json."""

from __future__ import annotations

import json

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.base.values import ContainerState
from kata_pin.peers.oci import MAX_KEPT, CpuResources, OciState, Phase, parse_config, parse_state

TYPE = "io.kubernetes.cri.container-type"


def state(**members: object) -> bytes:
    return json.dumps({"bundle": "/b/x"} | members).encode()


def config(cpu: object) -> bytes:
    return json.dumps({"linux": {"resources": {"cpu": cpu}}}).encode()


def test_go_runtime_state() -> None:
    """Empty ociVersion and status, as Kata's Go runtime sends them, are valid."""
    parsed = parse_state(
        state(ociVersion="", id="p1", status="", pid=1780, annotations={TYPE: "b"})
    )
    assert parsed == OciState(id="p1", bundle="/b/x", pid=1780, annotations={TYPE: "b"})
    assert parsed.annotations == {TYPE: "b"}


def test_least_state() -> None:
    """Only the bundle is needed; Go writes null for no annotations."""
    assert parse_state(state(annotations=None)) == OciState(id="", bundle="/b/x")


@pytest.mark.parametrize(
    ("text", "clean"),
    [("/a/b/", "/a/b"), ("//a///b", "/a/b"), ("/a/./b", "/a/b"), ("/", "/")],
)
def test_bundle_is_tidied(text: str, clean: str) -> None:
    """Slashes that mean nothing do not change the bundle."""
    assert parse_state(state(bundle=text)).bundle == clean


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"bundle": None}, "state: bundle: missing"),
        ({"bundle": ""}, "not an absolute path"),
        ({"bundle": "run/x"}, "not an absolute path"),
        ({"bundle": "/run/../etc"}, "not an absolute path"),
        ({"bundle": "/run/x\n"}, "control character"),
        ({"bundle": "/" + "x" * 5000}, "longer than"),
        ({"pid": "1"}, "state: pid: not an integer"),
        ({"pid": -1}, "state: pid: not within"),
        ({"pid": 1 << 40}, "state: pid: not within"),
        ({"id": 1}, "state: id: not a text"),
        ({"annotations": {TYPE: 1}}, f"state: annotations.{TYPE}: not a text"),
        ({"annotations": []}, "state: annotations: not an object"),
    ],
)
def test_wrong_state(members: dict[str, object], message: str) -> None:
    """A member that is wrong is named."""
    with pytest.raises(ParseError, match=message):
        parse_state(state(**members))


def test_config() -> None:
    """Annotations, cpu resources and cgroupsPath are read; the rest is none of ours."""
    parsed = parse_config(
        json.dumps(
            {
                "process": {"args": ["sh"]},
                "annotations": {"k": "v", TYPE: "w"},
                "linux": {
                    "cgroupsPath": "/kubepods/x",
                    "resources": {
                        "cpu": {
                            "cpus": "2-3",
                            "mems": "0",
                            "quota": -1,
                            "period": 100000,
                            "shares": 2048,
                        },
                        "memory": {"limit": 1},
                    },
                },
            }
        ).encode()
    )
    assert parsed.cpu == CpuResources("2-3", "0", -1, 100000, 2048)
    assert (parsed.cgroups_path, parsed.annotations) == ("/kubepods/x", {TYPE: "w"})


@pytest.mark.parametrize("data", [b"{}", b'{"linux":null}', b'{"linux":{"resources":null}}'])
def test_config_without_resources(data: bytes) -> None:
    """A missing value is None, not zero."""
    assert parse_config(data).cpu == CpuResources()


@pytest.mark.parametrize(
    ("cpu", "message"),
    [
        ({"quota": "100"}, "linux.resources.cpu.quota: not an integer"),
        ({"period": -1}, "linux.resources.cpu.period: not within"),
        ({"shares": 1 << 64}, "linux.resources.cpu.shares: not within"),
        ({"cpus": 3}, "linux.resources.cpu.cpus: not a text"),
        ([], "linux.resources.cpu: not an object"),
    ],
)
def test_wrong_config(cpu: object, message: str) -> None:
    """A member that is wrong is named with its whole path."""
    with pytest.raises(ParseError, match=message):
        parse_config(config(cpu))


@pytest.mark.parametrize("text", [",[{" * 70_000, '\\",' * 70_000, "\ud800"])
@pytest.mark.parametrize("count", [1, 5000])
def test_foreign_annotations_hide_nothing(text: str, count: int) -> None:
    """Neither what a pod's author writes into annotations nor how many there are is looked at."""
    foreign = {f"example.com/{number}": text[: len(text) // count + 1] for number in range(count)}
    annotations = {**foreign, TYPE: "container"}
    assert parse_state(state(annotations=annotations)).annotations == {TYPE: "container"}
    document = {"annotations": annotations, "linux": {"resources": {"cpu": {"cpus": "2-3"}}}}
    parsed = parse_config(json.dumps(document).encode())
    assert (parsed.annotations, parsed.cpu.cpus) == ({TYPE: "container"}, "2-3")


@pytest.mark.parametrize("number", [MAX_KEPT, MAX_KEPT + 1, (1 << 64) - 1])
def test_numbers_beyond_the_database(number: int) -> None:
    """OCI's numbers of 64 bits without a sign are kept as far as SQLite goes."""
    parsed = parse_config(config({"shares": number, "period": number, "cpus": "1"})).cpu
    assert parsed == CpuResources(cpus="1", period_us=MAX_KEPT, shares=MAX_KEPT)


def test_phases() -> None:
    """The container's state in each phase, and which hooks wait for the pins."""
    assert [phase.state for phase in Phase] == [
        ContainerState.CREATED,
        ContainerState.CREATED,
        ContainerState.CREATED,
        ContainerState.RUNNING,
        ContainerState.DELETED,
    ]
    assert {phase.value for phase in Phase if phase.waits_for_pins} == {"prestart", "createRuntime"}
    assert {phase.value for phase in Phase if phase.id_is_sandbox} == {"poststart", "poststop"}
