"""Every row of what the kubelet's own tests say, and the script that runs such rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.oracle import DATA, ROOT, rows
from tests.support.kubelet_live import MismatchError, host_topology, replay

FILES = sorted(DATA.glob("*.json"))
ROWS = [
    pytest.param(run, id=f"{file}-{row.get('id', number)}")
    for number, (file, row, run) in enumerate(rows(FILES))
]


@pytest.mark.parametrize("run", ROWS)
def test_a_row_raises_no_difference(run: Callable[[], None]) -> None:
    """The allocator decides what the row expects."""
    run()


def oracle(*files: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would, from elsewhere."""
    command = [str(ROOT / "scripts" / "oracle"), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=50, check=False)


def test_script_counts_all_rows() -> None:
    """All rows of all files pass and are counted in the last line."""
    done = oracle(*FILES)
    assert done.stdout.splitlines()[-1] == "106 passed, 0 failed"
    assert done.returncode == 0


def corrupted(section: str, number: int, **changes: object) -> dict[str, Any]:
    """Return a document with one row whose expectation is wrong."""
    for file in FILES:
        document: dict[str, Any] = json.loads(file.read_text())
        if section in document:
            kept = {key: document[key] for key in document if key.startswith("topologies")}
            return kept | {section: [document[section][number] | changes]}
    raise AssertionError(section)


@pytest.mark.parametrize(
    ("section", "number", "changes"),
    [
        ("take_cases", 1, {"expected": "1"}),
        ("take_cases", 0, {"error": False}),
        ("order_cases", 11, {"expected_ids": [2, 3, 4, 5]}),
        ("accumulator_cases", 1, {"satisfied": False}),
        ("cases", 0, {"expected_default": "1-10"}),
        ("cases", 5, {"expected": "2-3,8-11"}),
        ("cases", 5, {"op": "unheard-of"}),
        ("cases", 13, {"error_text": "SMT Alignment Error: not that"}),
        ("checkpoints", 0, {"checksum_valid": False}),
    ],
)
def test_script_tells_a_failing_row(
    tmp_path: Path, section: str, number: int, changes: dict[str, object]
) -> None:
    """A row that is not met is printed with its input, counted, and fails the run."""
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(corrupted(section, number, **changes)))
    done = oracle(file)
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 passed, 1 failed", done.stderr
    assert lines[0].startswith("FAILED rows.json")
    assert lines[1].startswith("  input {")
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda step: step.update(result="refused", reason="SMT Alignment Error"), "admitted"),
        (lambda step: step.update(default="0"), "shared pool"),
        (lambda step: step["entries"][step["pod"]].update(c0="3"), "c0: static's CPUs"),
        (lambda step: step["entries"].popitem(), "entries"),
    ],
    ids=["refused", "default", "given", "entries"],
)
def test_a_trace_is_one_row_with_its_first_difference(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], what: str
) -> None:
    """Each of the kubelet's answers counts: admission, every container's CPUs, the shared pool."""
    document: dict[str, Any] = json.loads((DATA / "kubelet_live.json").read_text())
    trace = document["traces"]["amd-llc"]
    document["traces"] = {"amd-llc": trace}
    change(trace["ops"][1])
    file = tmp_path / "live.json"
    file.write_text(json.dumps(document))
    done = oracle(file)
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed", done.stderr
    assert f"step 1, add {trace['ops'][1]['pod']}: {what}" in done.stdout


def test_what_kubelets_before_1_37_decide_otherwise() -> None:
    """With align-by-socket and distribute-cpus-across-numa they span packages, where a newer one,
    and kata-pin, take an uneven split within one."""
    document: dict[str, Any] = json.loads((DATA / "kubelet_live_1.37.json").read_text())
    cpus = json.loads((DATA / "kubelet_live.json").read_text())["topologies"]
    for name, answer in document["kubelet_1.34.1"].items():
        trace = document["traces"][name]
        number = answer["step"]
        other = {**trace["ops"][number], **answer}
        trace["ops"] = [*trace["ops"][:number], other]
        with pytest.raises(MismatchError, match=rf"step {number}, .* static's CPUs") as different:
            replay(host_topology(cpus[trace["topology"]]["cpus"]), trace)
        assert "expected 11,15,19-20,43,47,51-52" in str(different.value)
        assert "got      19-20,31,49,51-52,62-63" in str(different.value)


def test_script_without_files() -> None:
    """Nothing to run is a usage error, not a success."""
    assert oracle().returncode == 2


def test_script_with_a_file_it_can_not_read(tmp_path: Path) -> None:
    """A file that is missing or no JSON is named."""
    file = tmp_path / "rows.json"
    for text in (None, "{"):
        if text:
            file.write_text(text)
        done = oracle(file)
        assert done.returncode == 2
        assert done.stderr.startswith(f"oracle: {file}: ")
