"""Kata's files as doubles write them: each field is one that real Kata writes, of the same kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Host, Vm
from tests.support.katalike import ContainerSpec, KataDirs, KataSandbox, Runtime
from tests.support.recordings import files

MAPS = {"Annotations", "annotations"}
"""Objects whose keys are not Kata's."""


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every field with its kind; numbers are alike, and null says nothing."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = "*" if path.rpartition(".")[2] in MAPS else key
            yield from _fields(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{path}[]")
    elif value is not None:
        kind = "number" if type(value) in {int, float} else type(value).__name__
        yield path, kind


def _recorded(*patterns: str) -> set[tuple[str, str]]:
    found = [path for pattern in patterns for path in files(pattern)]
    assert found
    return {field for path in found for field in _fields(json.loads(path.read_text()))}


def _katalike(folder: Path, runtime: Runtime) -> Any:
    kata = KataSandbox(KataDirs.below(folder), "p1", runtime=runtime)
    kata.write_persist([ContainerSpec("p1"), ContainerSpec("c1", cpus="2-3")])
    return json.loads(kata.persist_path.read_text())


def _of_boundary(folder: Path) -> Any:
    vm = Vm(Host(folder / "h"), "p1")
    vm.persist(p1=None, c1="2-3")
    return json.loads((vm.host.vc / "sbs/p1/persist.json").read_text())


@pytest.mark.parametrize("double", ["katalike", "boundary"])
def test_persist_of_the_go_runtime(tmp_path: Path, double: str) -> None:
    """persist.json, as Kata 1.13 and 3.x wrote it."""
    made = _katalike(tmp_path, Runtime.GO) if double == "katalike" else _of_boundary(tmp_path)
    real = _recorded("**/*persist.json")
    assert sorted(set(_fields(made)) - real) == []


def test_state_of_runtime_rs(tmp_path: Path) -> None:
    """state.json, as Kata 4.1 wrote it."""
    made = _katalike(tmp_path, Runtime.RS)
    assert sorted(set(_fields(made)) - _recorded("state.json")) == []
