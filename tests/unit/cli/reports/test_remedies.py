"""Remedies of `doctor` fit the place: a command on a node, a value of the chart in a pod."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kata_pin.base.documents.document import Daemon
from kata_pin.base.values import Remedy, here
from kata_pin.cli.commands import inspect
from kata_pin.cli.doctor import node as doctor_node
from kata_pin.cli.reports import words
from kata_pin.service import exchange, runtime_dir

EVERY = {
    f"{module.__name__}.{name}": one
    for module in (words, inspect, runtime_dir, exchange)
    for name, one in vars(module).items()
    if isinstance(one, Remedy)
}
CHARTS = Path(__file__).resolve().parents[4] / "hooks" / "charts"
OF_NODES = re.compile(r"systemctl|mount -t|run as root|kata-pin install|kata-pin config check")


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_a_node_and_a_pod(pod: None) -> None:
    """One row, two remedies."""
    row = doctor_node.daemon_row(Daemon(running=False, reason="hangs", silent=True), wanted=True)
    assert row.remedy == "delete this pod: its DaemonSet starts another"


@pytest.mark.parametrize("name", EVERY)
def test_nothing_of_systemd_helps_in_a_pod(name: str, pod: None) -> None:
    """Where a remedy is the node's after all, it says so."""
    text = here(EVERY[name], file="F", mount="M", hint="H")
    assert "{" not in text
    assert "on the node" in text or not OF_NODES.search(text)


@pytest.mark.parametrize("name", [name for name, one in EVERY.items() if one.value])
def test_values_are_named(name: str) -> None:
    """The value of the record is in the text that is printed, and the chart has it."""
    assert f"value {EVERY[name].value}" in EVERY[name].pod
    values = yaml.safe_load((CHARTS / "kata-pin/values.yaml").read_text())
    for key in EVERY[name].value.split("."):
        values = values[key]


def test_a_hint_of_the_system_is_kept() -> None:
    assert here(words.EVENTS, hint="needs {x}") == "needs {x}"
