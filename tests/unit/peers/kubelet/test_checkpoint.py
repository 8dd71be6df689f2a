"""The kubelet's checkpoint: every oracle row, damage, and files made to hurt."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.placement import DoubleAssignment, KubeletState
from kata_pin.peers.kubelet.checkpoint import (
    MAX_DOUBLES,
    checksum,
    dump_checkpoint,
    parse_checkpoint,
)
from tests.support.checkpoint import checkpoint

ORACLE = Path(__file__).parents[3] / "data" / "kubelet" / "kubelet_checkpoints.json"
ROWS: list[dict[str, Any]] = json.loads(ORACLE.read_text())["checkpoints"]
LABELS = [f"{number}-v{row['version']}" for number, row in enumerate(ROWS)]


def test_oracle_is_whole() -> None:
    """All rows are there, of all four versions."""
    assert len(ROWS) == 13
    assert {row["version"] for row in ROWS} == {1, 2, 3, 4}


@pytest.mark.parametrize("row", ROWS, ids=LABELS)
def test_oracle(row: dict[str, Any]) -> None:
    """A file that the kubelet takes is read; what it cannot parse is an error here too."""
    if "could not parse" in row["restore_error"]:
        with pytest.raises(ParseError, match="defaultCpuSet"):
            parse_checkpoint(row["file"].encode())
        return
    document = json.loads(row["file"])
    if "data" in document:
        document = json.loads(document["data"])
    folded = {key.lower(): value for key, value in document.items()}
    state = parse_checkpoint(row["file"].encode())
    assert state.version == row["version"]
    assert state.policy == folded["policyname"]
    assert str(state.default) == folded["defaultcpuset"]
    assert {
        pod: {name: str(cpus) for name, cpus in containers.items()}
        for pod, containers in state.entries.items()
    } == folded.get("entries", {})
    assert {pod: {"cpuSet": str(cpus)} for pod, cpus in state.pod_entries.items()} == folded.get(
        "podEntries".lower(), {}
    )


@pytest.mark.parametrize("row", [row for row in ROWS if row["version"] == 2])
def test_written_as_the_kubelet_writes(row: dict[str, Any]) -> None:
    """A file of version 2 that was read is written again byte by byte."""
    assert dump_checkpoint(parse_checkpoint(row["file"].encode())) == row["file"].encode()


def test_written_in_the_kubelets_order() -> None:
    """Maps are sorted, as Go writes them, whatever the order in the state."""
    cpus = CpuSet([1])
    one = KubeletState("static", EMPTY, {"b": {"y": cpus, "x": cpus}, "a": {"z": cpus}})
    same = KubeletState("static", EMPTY, {"a": {"z": cpus}, "b": {"x": cpus, "y": cpus}})
    assert dump_checkpoint(one) == dump_checkpoint(same)
    assert replace(parse_checkpoint(dump_checkpoint(one)), doubles=()) == same


@pytest.mark.parametrize("row", ROWS, ids=LABELS)
def test_a_wrong_checksum(row: dict[str, Any]) -> None:
    """A stored checksum that is off by one is found, in every version."""
    right = str(row.get("dataChecksum", row.get("checksum")))
    assert row["file"].count(right) == 1
    with pytest.raises(ParseError, match="does not match"):
        parse_checkpoint(row["file"].replace(right, str(int(right) - 1)).encode())


@pytest.mark.parametrize("row", ROWS, ids=LABELS)
def test_a_changed_cpu(row: dict[str, Any]) -> None:
    """A CPU list that is not what was written is found, in every version."""
    damaged = re.sub(r'(efaultC(?:pu|PU)Set(?:\\?"):(?:\\?"))[0-9]', r"\g<1>9", row["file"])
    assert damaged != row["file"]
    with pytest.raises(ParseError, match="does not match"):
        parse_checkpoint(damaged.encode())


def test_fnv() -> None:
    """FNV-1a's published values (draft-eastlake-fnv)."""
    assert [checksum(text) for text in ("", "a", "foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]


def test_version_1_containers() -> None:
    """Version 1 keeps containers by id, without pods; a checksum of 0 goes unchecked there."""
    text = b'{"policyName":"static","defaultCpuSet":"0","entries":{"abc":"1-2"},"checksum":0}'
    state = parse_checkpoint(text)
    assert (state.version, state.entries) == (1, {"": {"abc": CpuSet([1, 2])}})
    dump = (
        "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0 "
        "Entries:(map[string]string)map[abc:1-2] Checksum:(checksum.Checksum)0}"
    )
    checked = text.replace(b'"checksum":0', f'"checksum":{checksum(dump)}'.encode())
    assert parse_checkpoint(checked).version == 1


def test_checksum_zero() -> None:
    """Version 2 readers skip it, version 3 readers never do."""
    state = parse_checkpoint(b'{"policyName":"static","defaultCpuSet":"0-3","checksum":0}')
    assert (state.version, state.default, state.static) == (2, CpuSet(range(4)), True)
    with pytest.raises(ParseError, match="does not match"):
        parse_checkpoint(b'{"policyName":"static","podEntries":{},"checksum":0}')


def test_keys_in_any_case() -> None:
    """Go reads keys in any case, and so do we."""
    state = parse_checkpoint(b'{"POLICYNAME":"none","defaultCPUSET":"4-6","Checksum":354655845}')
    assert state.policy == "none"


def test_empty_texts() -> None:
    """A fresh file has no CPUs yet."""
    assert parse_checkpoint(b'{"policyName":"","defaultCpuSet":""}').default == EMPTY


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"\0" * 100, "not JSON"),
        (b'{"policyName":1}', "policyname: not a text"),
        (b'{"entries":{"p":{"c":"1"},"q":"2"}}', "entries.q: not an object"),
        (b'{"entries":{"p":{"c":1}}}', "entries.p.c: not a text"),
        (b'{"entries":{"p":{"c":"0-99999999999"}}}', "entries.p.c: not a CPU"),
        (b'{"checksum":-1}', "checksum: not within"),
        (b'{"checksum":1}', "checksum: does not match"),
        (b'{"data":"{}"}', "datachecksum: missing"),
        (b'{"data":{},"dataChecksum":1}', "data: not a text"),
        (b'{"policyName":"a","policyname":"b"}', "differ only by case"),
    ],
)
def test_wrong(data: bytes, message: str) -> None:
    """What is wrong is named."""
    with pytest.raises(ParseError, match=rf"^kubelet checkpoint: .*{message}"):
        parse_checkpoint(data)


def test_pod_entries_cannot_swell() -> None:
    """Sets that would dump to gigabytes are refused before they are dumped."""
    pods = ",".join(f'"p{n}":{{"cpuSet":"0-8191"}}' for n in range(8000))
    start = time.process_time()
    with pytest.raises(ParseError, match="more CPUs than a host can have"):
        parse_checkpoint(f'{{"podEntries":{{{pods}}},"checksum":1}}'.encode())
    assert time.process_time() - start < 2


def test_the_longest_file() -> None:
    """A file at the size limit takes little time, one above is refused."""
    entries = ",".join(f'"{n:036}":{{"c":"{n % 8192}"}}' for n in range(4000))
    data = f'{{"policyName":"static","entries":{{{entries}}},"checksum":1}}'.encode()
    start = time.process_time()
    with pytest.raises(ParseError, match="does not match"):
        parse_checkpoint(data)
    assert time.process_time() - start < 3
    with pytest.raises(ParseError, match="longer than"):
        parse_checkpoint(b" " * 300_000)


@pytest.mark.parametrize(
    ("default", "entries", "doubles"),
    [
        ("0-3", {"a": {"c": "4-6"}, "b": {"c": "7"}}, ()),
        ("0-3", {"a": {"init": "4-6", "c": "5-7"}}, ()),
        (
            "0",
            {"a": {"c": "4-6"}, "b": {"c": "7", "d": "6,8"}, "e": {"c": "1"}},
            (DoubleAssignment(CpuSet([6]), ("a", "b")),),
        ),
        (
            "0",
            {"a": {"c": "4"}, "b": {"c": "5"}, "e": {"c": "4,6"}},
            (DoubleAssignment(CpuSet([4]), ("a", "e")),),
        ),
        ("0-4", {"a": {"c": "4-6"}}, (DoubleAssignment(CpuSet([4]), ("a",), in_default=True),)),
        (
            "0,2",
            {"a": {"c": "1-2"}, "b": {"c": "1"}, "e": {"c": "1,3"}},
            (
                DoubleAssignment(CpuSet([2]), ("a",), in_default=True),
                DoubleAssignment(CpuSet([1]), ("a", "b")),
                DoubleAssignment(CpuSet([1]), ("a", "b", "e")),
            ),
        ),
    ],
)
def test_double_assignments_are_named(
    default: str, entries: dict[str, dict[str, str]], doubles: tuple[DoubleAssignment, ...]
) -> None:
    """CPUs of two pods, or of a pod and the default set; a pod's own containers may overlap."""
    state = parse_checkpoint(checkpoint(default, entries).encode())
    assert state.doubles == doubles
    assert state.default == CpuSet.parse(default)


def test_pod_level_assignments_can_be_double_too() -> None:
    """A pool of a pod counts as the pod's; its containers' own CPUs lie in it."""
    data = {
        "policyName": "static",
        "defaultCpuSet": "0",
        "entries": {"a": {"c": "1"}, "b": {"c": "3"}},
        "podEntries": {"a": {"cpuSet": "1-3"}},
    }
    text = json.dumps(data)
    outer = json.dumps({"data": text, "dataChecksum": checksum(f"(string){text}")})
    assert parse_checkpoint(outer.encode()).doubles == (DoubleAssignment(CpuSet([3]), ("a", "b")),)


def test_named_double_assignments_are_few() -> None:
    """A file in which thousands of pods have the same CPU costs no more than others."""
    entries = {f"{pod}": {"c": "1"} for pod in range(5000)}
    began = time.process_time()
    assert len(parse_checkpoint(checkpoint("0", entries).encode()).doubles) == MAX_DOUBLES
    assert time.process_time() - began < 10


def test_half_a_surrogate_pair_is_an_error() -> None:
    """A pod's name that no checksum can be made of is damage like any other."""
    document = b'{"policyName":"static","defaultCpuSet":"0","entries":{"\\ud800":{"c":"1"}}}'
    with pytest.raises(ParseError, match="half of a surrogate pair in a key"):
        parse_checkpoint(document)
