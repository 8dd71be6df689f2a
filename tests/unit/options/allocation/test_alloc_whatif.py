"""`alloc what-if`: a policy asked about a container that there is not."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.documents.state import Kubelet
from kata_pin.base.errors import KataPinError
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.policies import create
from kata_pin.options.allocation.supposed import Question, answer, occupied
from tests.support.commandline import run
from tests.support.hosttree import SYSFS
from tests.unit.cli import documents as docs
from tests.unit.cli.supposed import FULL, HOST, supposed
from tests.unit.conftest import Serve

SERVER = str(SYSFS / "two-sockets-smt.tree")
ASK = ["alloc", "what-if", "--cpus", "4", "--policy", "topology", "--topology", SERVER]


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_another_host(capsys: pytest.CaptureFixture[str]) -> None:
    """A captured host is asked about without a daemon; the best candidate is what is given."""
    assert run([*ASK, "--json"]) == 0
    document = _json(capsys)
    assert document["grant"]["exclusive"] == document["candidates"][0]["taken"] == "0-3"
    assert (document["vm"]["cpus"], document["after"]["shared"]) == ("4-7", "4-15")
    keys = [[key["value"] for key in one["keys"]] for one in document["candidates"]]
    assert keys == sorted(keys)


def test_a_folder_with_a_sys_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tree copied from a host says the same as its listing."""
    for line in Path(SERVER).read_text().splitlines():
        place, _, content = line.partition("\t")
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    assert run([*ASK, "--json"]) == 0
    listed = _json(capsys)
    assert run([*ASK[:-1], str(tmp_path), "--json"]) == 0
    assert _json(capsys) == listed


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Text names what is given, the keys, and how many candidates are not shown."""
    assert run([*ASK[:5], "static", *ASK[6:], "--taken", "0"]) == 0
    out = capsys.readouterr().out
    assert "AVAILABLE" in out
    assert "exclusive    " in out
    assert "not taken; --json lists all" in out


NIC = "0000:3b:00.0"


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A host of two nodes, copied, with a card on the second one."""
    for line in Path(SERVER).read_text().splitlines():
        place, _, content = line.partition("\t")
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    card = tmp_path / f"sys/devices/pci0000:3a/{NIC}"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / f"sys/bus/pci/devices/{NIC}").symlink_to(f"../../../devices/pci0000:3a/{NIC}")
    return tmp_path


def test_near_a_device(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The CPUs are on its node, where without it they are on the other one."""
    ask = [*ASK[:-1], str(captured)]
    assert run([*ask, "--json"]) == 0
    assert _json(capsys)["grant"]["exclusive"] == "0-3"
    assert run([*ask, "--near", "3b:00.0", "--json"]) == 0
    document = _json(capsys)
    assert document["near"] == [NIC]
    assert f"near {NIC} (NUMA node 1)" in document["grant"]["reasons"]
    assert document["grant"]["exclusive"] != "0-3"
    assert run([*ask, "--near", NIC]) == 0
    assert f"4 CPUs, near {NIC}" in capsys.readouterr().out
    assert run([*ask[:5], "static", *ask[6:], "--near", NIC, "--json"]) == 0
    document = _json(capsys)
    assert document["grant"]["exclusive"] == "0-3"
    assert "does not place CPUs near devices" in document["notes"][0]["text"]


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("eth0", 2, "'eth0' is not a PCI address"),
        ("0000:ff:00.0", 1, "no PCI device 0000:ff:00.0"),
    ],
)
def test_near_nothing(
    captured: Path, address: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error and a device that is not there are told apart; a listing has no devices."""
    assert run([*ASK[:-1], str(captured), "--near", address]) == code
    assert said in capsys.readouterr().err
    assert run([*ASK, "--near", NIC]) == 1
    assert "lists no devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantity", "millis"),
    [("4", 4000), ("0.5", 500), ("1500m", 1500), ("0.0001", 1), ("8192", 8192000)],
)
def test_quantities(quantity: str, millis: int, capsys: pytest.CaptureFixture[str]) -> None:
    """`1` is `1000m`; less than a thousandth is one, as in Kubernetes."""
    arguments = ["alloc", "what-if", "--policy", "static", "--topology", SERVER, "--json"]
    assert run([*arguments, "--cpus", quantity]) == 0
    assert _json(capsys)["millis"] == millis


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--cpus", "four"], 2, "CPU quantity"),
        (["--cpus", "NaN"], 2, "CPU quantity"),
        (["--cpus", "Infinity"], 2, "CPU quantity"),
        (["--cpus", "1e9"], 2, "not within"),
        (["--cpus", "-1"], 2, "not within"),
        (["--cpus", "1", "--taken", "3-1"], 2, "runs backwards"),
        (["--cpus", "1", "--policy", "balloons"], 78, "balloons"),
        (["--cpus", "1", "--class", "shared"], 2, "shared"),
        (["--cpus", "1", "--pod", "shop/none"], 1, "no pod"),
        (["--cpus", "1", "--topology", "/nonexistent"], 1, "/nonexistent"),
        (["--cpus", "1", "--topology", __file__], 1, "test_alloc_whatif.py:1"),
    ],
)
def test_wrong_questions(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What makes no sense is told in one line, with its exit status."""
    base = ["alloc", "what-if", "--policy", "static", "--topology", SERVER]
    assert run([*base, *arguments]) == status
    assert said in capsys.readouterr().err


def test_no_policy_is_set(capsys: pytest.CaptureFixture[str], serve: Serve) -> None:
    """Without a policy in the settings one has to be named."""
    config = serve({})
    assert run(["alloc", "what-if", "--cpus", "1", "--config", str(config)]) == 1
    assert "--policy" in capsys.readouterr().err


def test_this_node(capsys: pytest.CaptureFixture[str], serve: Serve) -> None:
    """Without --topology it is this host, with the grants that the daemon shows."""
    document = docs.allotted()
    config = serve({"state": lambda _: deepcopy(document)})
    ask = ["alloc", "what-if", "--cpus", "1", "--policy", "static", "--config", str(config)]
    assert run([*ask, "--json"]) == 0
    answer = _json(capsys)
    assert answer["policy"] == "static"
    assert answer["grant"] is not None


@pytest.mark.root
def test_the_size_of_its_vm_by_kata_s_configuration(
    capsys: pytest.CaptureFixture[str], serve: Serve, tmp_path: Path
) -> None:
    """Beside kata-pin's allocator containers keep their limits: each configuration's vCPUs."""
    (tmp_path / "configuration.toml").write_text(
        '[hypervisor.qemu]\npath = "/q"\noverhead_vcpus = 0.2\n'
        '[runtime]\nhypervisor_name = "qemu"\nstatic_sandbox_resource_mgmt = true\n'
    )
    document = docs.allotted()
    config = serve({"state": lambda _: deepcopy(document)})
    with config.open("a") as file:
        file.write(f"\npaths: {{kata_configs: [{tmp_path}]}}\n")
    ask = ["alloc", "what-if", "--cpus", "1500m", "--policy", "static", "--config", str(config)]
    assert run([*ask, "--json"]) == 0
    notes = {note["code"]: note["text"] for note in _json(capsys)["notes"]}
    assert notes["vm-size"] == f"{tmp_path}/configuration.toml: its VM has 2 vCPUs"
    assert run([*ask, "--no-kata", "--json"]) == 0
    assert "vm-size" not in {note["code"] for note in _json(capsys)["notes"]}


def test_grants_of_the_node_are_taken() -> None:
    """CPUs that the daemon gave out are not free; who shares would have others."""
    document = supposed("annotation", Question(2000, CpuClass.EXCLUSIVE), on_node=True)
    assert document.before.exclusive == "4-7,12-13"
    assert document.grant is not None
    given = CpuSet.parse(document.grant.exclusive)
    assert given.isdisjoint(CpuSet.parse("4-7,12-13,1,9"))
    assert document.others


def test_one_more_container_of_a_pod() -> None:
    """Supposed in a pod of the node, it is near that pod's containers and has its VM."""
    document = supposed("topology", Question(1000, pod="media/\x1b[31mencoder"), on_node=True)
    assert document.pod
    assert document.grant is not None
    assert CpuSet.parse(document.grant.exclusive) <= CpuSet.parse("14-15")
    with pytest.raises(KataPinError, match="no pod"):
        supposed("topology", Question(1000, pod="media/other"), on_node=True)


def test_who_uses_a_part_of_the_pool_goes_on_with_it() -> None:
    """A container that keeps to one node's shared CPUs is not told of changes on another."""
    document = docs.allotted()
    allocation = document.allocation
    assert allocation is not None
    grants = tuple(
        replace(grant, shared="0-1", cpus="0-1")
        if grant.cpu_class == "none" and grant.kind == "container"
        else grant
        for grant in allocation.grants
    )
    document = replace(document, allocation=replace(allocation, grants=grants))
    chosen = create("static", HOST, Alloc())
    state = occupied(chosen, document, EMPTY)
    answered = answer(chosen, state, Question(1000))
    assert answered.grant is not None
    assert CpuSet.parse(answered.grant.exclusive).isdisjoint(CpuSet.parse("0-1"))
    assert not {one.id for one in grants if one.cpus == "0-1"} & set(answered.others)


def test_annotation_without_a_class_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A pod without annotation or override has no CPUs of its own, and the reason is said."""
    ask = ["alloc", "what-if", "--cpus", "2", "--policy", "annotation", "--topology", SERVER]
    assert run([*ask, "--json"]) == 0
    grant = _json(capsys)["grant"]
    assert (grant["cpu_class"], grant["exclusive"]) == ("none", "")
    assert "its pod has no annotation" in grant["reasons"]
    for chosen in ("share", "exclusive"):
        assert run([*ask, "--json", "--class", chosen]) == 0
        assert _json(capsys)["grant"]["cpu_class"] == chosen


def test_refused() -> None:
    """A strict node would refuse the creation: nothing is given and nothing changes."""
    assert FULL.grant is None
    assert FULL.refused is not None
    assert FULL.refused.strict
    assert FULL.before == FULL.after


def test_kubelets_cpus_are_taken() -> None:
    """What the kubelet's static policy gave out is nobody's to give."""
    document = docs.state(kubelet=Kubelet("static", "0-3,8-11"))
    chosen = create("static", HOST, Alloc())
    assert occupied(chosen, document, EMPTY).taken == CpuSet.parse("4-7,12-15")
