"""Which container a message is about: dialects, quirks of both runtimes, hostile ids (D4)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerKind, ContainerState
from kata_pin.peers.oci import (
    ContainerIds,
    CpuResources,
    OciConfig,
    OciState,
    Phase,
    identify,
    record,
)

NO_CPU = CpuResources()
SANDBOX, CONTAINER = ContainerKind.SANDBOX, ContainerKind.CONTAINER

CRI = "io.kubernetes.cri."
CRIO = "io.kubernetes.cri-o."
KATA = "io.katacontainers.pkg.oci.container_type"


def who(
    annotations: Mapping[str, str],
    *,
    bundle: str = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/c1",
    phase: Phase = Phase.CREATE_RUNTIME,
    id: str = "c1",  # noqa: A002 - the state's own word
    config: OciConfig | None = None,
) -> ContainerIds:
    return identify(phase, OciState(id=id, bundle=bundle, annotations=annotations), config)


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        pytest.param(
            {CRI + "container-type": "container", CRI + "sandbox-id": "s1"},
            ContainerIds("c1", "s1", CONTAINER),
            id="containerd container",
        ),
        pytest.param(
            {CRI + "container-type": "sandbox", CRI + "sandbox-id": "c1"},
            ContainerIds("c1", "c1", SANDBOX),
            id="containerd sandbox",
        ),
        pytest.param(
            {CRI + "container-type": "sandbox"},
            ContainerIds("c1", "c1", SANDBOX),
            id="sandbox without its id",
        ),
        pytest.param(
            {CRIO + "ContainerType": "container", CRIO + "SandboxID": "s1"},
            ContainerIds("c1", "s1", CONTAINER),
            id="CRI-O container",
        ),
        pytest.param(
            {CRIO + "ContainerType": "sandbox", CRIO + "SandboxID": "c1"},
            ContainerIds("c1", "c1", SANDBOX),
            id="CRI-O sandbox",
        ),
        pytest.param(
            {"io.kubernetes.docker.type": "container", "io.kubernetes.sandbox.id": "s1"},
            ContainerIds("c1", "s1", CONTAINER),
            id="dockershim container",
        ),
        pytest.param(
            {"io.kubernetes.docker.type": "podsandbox"},
            ContainerIds("c1", "c1", SANDBOX),
            id="dockershim sandbox",
        ),
        pytest.param({}, ContainerIds("c1", "c1", CONTAINER), id="none"),
        pytest.param({KATA: "pod_sandbox"}, ContainerIds("c1", "c1", CONTAINER), id="Kata 1 or 2"),
        pytest.param({KATA: "single_container"}, ContainerIds("c1", "c1", CONTAINER), id="Kata 3"),
        pytest.param(
            {KATA: "pod_container", CRI + "container-type": "container", CRI + "sandbox-id": "s1"},
            ContainerIds("c1", "s1", CONTAINER),
            id="Kata's beside containerd's",
        ),
        pytest.param(
            {
                CRI + "container-type": "container",
                CRI + "sandbox-id": "s1",
                CRIO + "ContainerType": "sandbox",
                CRIO + "SandboxID": "other",
                CRIO + "ContainerID": "victim",
            },
            ContainerIds("c1", "s1", CONTAINER),
            id="containerd first, CRI-O's keys of the pod's author do not count",
        ),
    ],
)
def test_dialects(annotations: dict[str, str], expected: ContainerIds) -> None:
    """Each container manager's marks give container, sandbox and kind."""
    assert who(annotations) == expected


@pytest.mark.parametrize("phase", list(Phase))
def test_annotations_of_config_count_alike(phase: Phase) -> None:
    """Kata 1.x passes no annotations in the state: config.json's do as well, in every phase."""
    config = OciConfig({CRI + "container-type": "container", CRI + "sandbox-id": "s1"})
    assert who({}, phase=phase, config=config) == ContainerIds("c1", "s1", CONTAINER)


def test_config_counts_more_than_the_state() -> None:
    """Where both carry an annotation, the runtime's own file counts."""
    config = OciConfig({CRI + "container-type": "container", CRI + "sandbox-id": "s1"})
    assert who({CRI + "sandbox-id": "other"}, config=config).sandbox_id == "s1"


@pytest.mark.parametrize("phase", [Phase.POSTSTART, Phase.POSTSTOP])
def test_the_sandbox_id_in_state_is_ignored(phase: Phase) -> None:
    """The Go runtime sends the sandbox's id for another container: the bundle counts."""
    marks = {CRI + "container-type": "container", CRI + "sandbox-id": "s1"}
    assert who(marks, phase=phase, id="s1") == ContainerIds("c1", "s1", CONTAINER)


@pytest.mark.parametrize("phase", [Phase.PRESTART, Phase.CREATE_RUNTIME, Phase.CREATE_CONTAINER])
def test_a_state_id_that_disagrees_is_reported(phase: Phase) -> None:
    """Elsewhere the state's id should be the container's: the bundle counts, with a note."""
    identity = who({}, phase=phase, id="other")
    assert (identity.container_id, identity.note) == (
        "c1",
        "the state's id 'other' differs from the bundle's",
    )


def test_userdata() -> None:
    """CRI-O and podman keep config.json one folder deeper."""
    bundle = "/run/containers/storage/overlay-containers/c1/userdata"
    assert who({}, bundle=bundle).container_id == "c1"


def test_crio_container_id() -> None:
    """CRI-O's own annotation comes first, and a bundle that disagrees is reported."""
    marks = {
        CRIO + "ContainerID": "c9",
        CRIO + "ContainerType": "container",
        CRIO + "SandboxID": "s1",
    }
    identity = who(marks, id="c9")
    assert identity == ContainerIds("c9", "s1", CONTAINER, "the bundle's path names container 'c1'")
    assert who(marks, id="c9", bundle="/x/c9/userdata").note == ""


def test_containerds_marks_in_a_bundle_of_crio_are_the_pod_authors() -> None:
    """An annotation of the pod cannot put its containers, and their CPUs, into another sandbox."""
    marks = {
        CRIO + "ContainerType": "container",
        CRIO + "SandboxID": "s1",
        CRIO + "ContainerID": "c1",
        CRI + "container-type": "container",
        CRI + "sandbox-id": "victim",
    }
    bundle = "/run/containers/storage/overlay-containers/c1/userdata"
    assert who(marks, bundle=bundle) == ContainerIds("c1", "s1", CONTAINER)


def test_unread_config() -> None:
    """Without config.json and marks, the Go runtime's id still names the sandbox."""
    assert who({}, phase=Phase.POSTSTART, id="s1") == ContainerIds("c1", "s1", CONTAINER)
    read = who({}, phase=Phase.POSTSTART, id="s1", config=OciConfig())
    assert read == ContainerIds("c1", "c1", CONTAINER)


def test_pod_container_without_a_sandbox() -> None:
    """Kata's own mark names no sandbox: only poststart and poststop can."""
    assert who({KATA: "pod_container"}, phase=Phase.POSTSTOP, id="s1").sandbox_id == "s1"
    with pytest.raises(ParseError, match="without a sandbox id"):
        who({KATA: "pod_container"})


def test_an_unknown_type_is_a_container() -> None:
    """An undefined type is noted, and the sandbox id counts."""
    identity = who({CRI + "container-type": "fridge", CRI + "sandbox-id": "s1"})
    assert (identity.sandbox_id, identity.kind) == ("s1", CONTAINER)
    assert "fridge" in identity.note


def test_a_sandbox_that_names_another() -> None:
    """A sandbox in another sandbox is reported."""
    identity = who({CRI + "container-type": "sandbox", CRI + "sandbox-id": "s1"})
    assert (identity.sandbox_id, identity.note) == (
        "s1",
        "the sandbox container names another sandbox 's1'",
    )


BAD_IDS = [
    pytest.param("a b", id="space"),
    pytest.param("-a", id="dash first"),
    pytest.param(".a", id="dot first"),
    pytest.param("a\x1b[31m", id="escape"),
    pytest.param("a\n", id="newline"),
    pytest.param("é", id="not ASCII"),
    pytest.param("a" * 129, id="long"),
]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_bad_container_id(bad: str) -> None:
    """A bundle whose name cannot be an id is refused."""
    with pytest.raises(ParseError, match="not a valid container id"):
        who({}, bundle=f"/run/{bad}")


@pytest.mark.parametrize("bad", [*BAD_IDS, "../../etc", "a/b"])
def test_bad_sandbox_id(bad: str) -> None:
    """A sandbox id that is a path, or no id at all, is refused in every dialect."""
    for type_key, sandbox_key in (
        (CRI + "container-type", CRI + "sandbox-id"),
        (CRIO + "ContainerType", CRIO + "SandboxID"),
        ("io.kubernetes.docker.type", "io.kubernetes.sandbox.id"),
    ):
        with pytest.raises(ParseError, match="not a valid container id"):
            who({type_key: "container", sandbox_key: bad})


@pytest.mark.parametrize("bad", [*BAD_IDS, "../../etc", "a/b"])
def test_bad_crio_container_id(bad: str) -> None:
    """CRI-O's container id is checked like any other."""
    with pytest.raises(ParseError, match="ContainerID: not a valid container id"):
        who({CRIO + "ContainerID": bad})


@pytest.mark.parametrize("bundle", ["/", "/userdata"])
def test_a_bundle_without_a_name(bundle: str) -> None:
    """The root folder names no container."""
    with pytest.raises(ParseError, match=r"^bundle: not a valid container id"):
        who({}, bundle=bundle)


def make(
    cpu: CpuResources = NO_CPU,
    annotations: Mapping[str, str] | None = None,
    phase: Phase = Phase.CREATE_RUNTIME,
    note: str = "",
) -> Container:
    state = OciState(id="c1", bundle="/run/c1", pid=77)
    config = OciConfig(annotations or {}, cpu, "/kubepods/pod1/c1")
    return record(phase, state, config, stamp_ns=5, note=note)


def test_record() -> None:
    """Everything that is known about a containerd container is in the record."""
    annotations = {
        CRI + "container-type": "container",
        CRI + "sandbox-id": "s1",
        CRI + "container-name": "app",
        CRI + "sandbox-name": "web-0",
        CRI + "sandbox-namespace": "prod",
        CRI + "sandbox-uid": "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
        "io.containerd.cri.runtime-handler": "kata-qemu",
    }
    assert make(CpuResources("4-5", "0", 200000, 100000, 2048), annotations) == Container(
        id="c1",
        sandbox_id="s1",
        kind=CONTAINER,
        state=ContainerState.CREATED,
        cpus=CpuSet([4, 5]),
        mems="0",
        quota_us=200000,
        period_us=100000,
        shares=2048,
        cgroups_path="/kubepods/pod1/c1",
        name="app",
        pod_name="web-0",
        pod_namespace="prod",
        pod_uid="1b4e28ba-2fa1-11d2-883f-0016d3cca427",
        handler="kata-qemu",
        bundle="/run/c1",
        source="hook:createRuntime",
        recorded_ns=5,
        pid_hint=77,
    )


def test_record_of_crio() -> None:
    """CRI-O's names come from the labels that it copies, its handler from its own key."""
    container = make(
        annotations={
            CRIO + "ContainerType": "container",
            CRIO + "SandboxID": "s1",
            CRIO + "ContainerName": "k8s_app_web-0_prod_uid_0",
            CRIO + "RuntimeHandler": "kata",
            "io.kubernetes.container.name": "app",
            "io.kubernetes.pod.name": "web-0",
            "io.kubernetes.pod.namespace": "prod",
            "io.kubernetes.pod.uid": "u-1",
        }
    )
    assert (container.name, container.pod_name, container.pod_namespace) == ("app", "web-0", "prod")
    assert (container.pod_uid, container.handler) == ("u-1", "kata")


def test_record_without_config() -> None:
    """After poststop the bundle may be gone: the record has no cpuset and is deleted."""
    container = record(Phase.POSTSTOP, OciState(id="c1", bundle="/run/c1"), None, stamp_ns=9)
    assert (container.cpus, container.state) == (None, ContainerState.DELETED)


@pytest.mark.parametrize("cpus", ["", " ", "\n"])
def test_no_cpuset(cpus: str) -> None:
    """An empty list is no cpuset, not an empty set."""
    assert make(CpuResources(cpus)).cpus is None


@pytest.mark.parametrize("cpus", ["0-99999999999", "5-1", "a", "0-3:2/4", "0," * 40_000, "-1"])
def test_a_bad_cpu_list_is_not_fatal(cpus: str) -> None:
    """The container is recorded without a cpuset, and the note says why."""
    container = make(CpuResources(cpus, "x"), note="first")
    assert (container.id, container.cpus, container.mems) == ("c1", None, "")
    notes = ["first; ", "cpu.cpus: ", "; cpu.mems: "]
    places = [container.note.find(part) for part in notes]
    assert -1 not in places
    assert all(a < b for a, b in pairwise(places))
    assert len(container.note) < 400


@pytest.mark.parametrize("name", ["a b", "\x1b[2J", "x" * 254, "a/b"])
def test_a_bad_name_is_left_out(name: str) -> None:
    """A name that Kubernetes would not allow is not shown, and reported in safe form."""
    container = make(annotations={CRI + "container-name": name})
    assert container.name == ""
    assert "container-name is not a valid name" in container.note
    assert container.note.isprintable()
