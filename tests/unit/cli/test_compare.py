"""`alloc compare` and `alloc export`: our grants and a kubelet's checkpoint, side by side."""

import json
from pathlib import Path

import pytest

from kata_pin.base.placement import KubeletState
from kata_pin.options.allocation.policies import BUILTIN
from kata_pin.options.allocation.supposed import SAME
from kata_pin.peers.kubelet.checkpoint import parse_checkpoint
from tests.support.checkpoint import checkpoint
from tests.support.commandline import run
from tests.support.hosttree import SYSFS
from tests.support.world import cpus
from tests.unit.cli import documents as docs
from tests.unit.cli.compared import decided, supposed
from tests.unit.conftest import Serve

ALLOCATION = docs.allotted().allocation
ALLOCATED = ALLOCATION.grants if ALLOCATION else ()
SERVER = str(SYSFS / "two-sockets-smt.tree")


@pytest.mark.parametrize("policy", BUILTIN)
def test_a_take_over_moves_nobody(policy: str) -> None:
    """Every policy leaves Guaranteed containers on the CPUs that the kubelet gave them."""
    entries = {"a": {"x": cpus("1,9"), "y": cpus("4-7,12-15")}, "b": {}}
    kubelet = KubeletState("static", cpus("0,2-3,8,10-11"), entries)
    document = supposed(policy, kubelet)
    assert document.same
    assert [row.verdict for row in document.containers] == [SAME, SAME]


def test_what_differs() -> None:
    """Each side may know a container that the other does not, or give it other CPUs."""
    exclusive = {
        (one.pod_uid, one.name or one.id): one.exclusive for one in ALLOCATED if one.exclusive
    }
    (uid, name), *rest = exclusive
    document = decided(
        KubeletState("static", cpus("0"), {uid: {name: cpus("15")}, "z": {"y": cpus("1")}})
    )
    verdicts = {(row.pod_uid, row.name): row.verdict for row in document.containers}
    assert verdicts == {
        (uid, name): "other pCPUs",
        ("z", "y"): "kubelet only",
        **dict.fromkeys(rest, "kata-pin only"),
    }
    assert not document.same


def test_an_export_is_the_same(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is exported is a checkpoint with its checksum, and compares as the same."""
    config = ["--config", str(serve({"state": lambda _: docs.allotted()}))]
    assert run(["alloc", "export", *config]) == 0
    text = capsys.readouterr().out
    assert parse_checkpoint(text.encode()).entries
    copy = tmp_path / "cpu_manager_state"
    copy.write_text(text)
    assert run(["alloc", "compare", str(copy), "--json", *config]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["same"]
    assert not document["hypothetical"]
    assert document["containers"]


def test_where_nobody_decides(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """Grants that are not in force are not exported."""
    document = docs.allotted(suspended="the kubelet's CPU manager policy is static")
    config = serve({"state": lambda _: document})
    assert run(["alloc", "export", "--config", str(config)]) == 1
    assert "CPU allocation is off" in capsys.readouterr().err


def test_another_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint and the topology of another host are enough; no daemon is asked."""
    copy = tmp_path / "cms"
    copy.write_text(checkpoint("4-7,10-15", {"p1": {"app": "0-1,8-9"}, "p2": {"db": "2-3"}}))
    assert run(["alloc", "compare", str(copy), "--topology", SERVER]) == 0
    out = capsys.readouterr().out
    assert "policy static, hypothetical" in out
    assert "no differences" in out


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is named, with the reason."""
    broken = tmp_path / "broken"
    broken.write_text(checkpoint("0-3").replace("0-3", "0-2"))
    for path, why in ((broken, "does not match"), (tmp_path / "none", "No such file")):
        assert run(["alloc", "compare", str(path)]) == 1
        err = capsys.readouterr().err
        assert str(path) in err
        assert why in err
