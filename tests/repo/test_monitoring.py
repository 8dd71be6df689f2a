"""Dashboard, rules and runbooks agree with the metrics, and with each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kata_pin.cli.main import COMMANDS
from kata_pin.config.table import BY_KEY

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "docs/monitoring"
RUNBOOKS = ROOT / "docs/runbooks"
METRICS = (ROOT / "docs/metrics.md").read_text()

GROUPS = yaml.safe_load((MONITORING / "kata-pin.rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
DASHBOARD = json.loads((MONITORING / "kata-pin.dashboard.json").read_text())
ROWS = {
    name
    for file in (ROOT / "kata_pin/cli/reports").glob("doctor*.py")
    for name in re.findall(r'\bRow\(\s*"([^"]+)"', file.read_text())
}
"""The checks of `doctor`."""

SCRAPE = {"up", "job", "instance"}
"""What Prometheus adds itself."""


def known() -> dict[str, set[str]]:
    """Return the labels of each metric of docs/metrics.md, by the names of its samples."""
    found = {}
    rows = re.findall(r"^\| `(kata_pin_\w+)` \| (\w+) \|([^|]*)\|", METRICS, re.MULTILINE)
    for name, kind, labels in rows:
        named = set(re.findall(r"`(\w+)`", labels))
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for suffix in suffixes:
            found[name + suffix] = named | ({"le"} if suffix == "_bucket" else set())
    return found


def expressions() -> Iterator[str]:
    """Yield every expression."""
    yield from (rule["expr"] for rule in RULES)
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    """As docs/metrics.md has them, which a test compares with the daemon."""
    metrics = known()
    without = re.sub(r'"[^"]*"', '""', expression)
    for name in re.findall(r"(?<![:\w])(kata_pin_\w+)", without):
        assert name in metrics, name
    for name in re.findall(r"\b\w+:kata_pin_\w+:\w+\b", without):
        assert name in RECORDED, name
    for name, selector in re.findall(r"(?<![:\w])(kata_pin_\w+)\{([^}]*)\}", without):
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= metrics[name] | SCRAPE
    grouped = re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", without)
    used = {label for names in grouped for label in re.findall(r"\w+", names)}
    available = {label for name in re.findall(r"kata_pin_\w+", without)
                 for label in metrics.get(name, ())}  # fmt: skip
    assert used <= available | SCRAPE


def test_every_metric_is_on_the_dashboard_or_in_a_rule() -> None:
    """But for the one that a setting switches on."""
    used = " ".join(expressions())
    unused = {name for name in known() if not re.search(rf"\b{name}\b", used)}
    assert unused <= {
        "kata_pin_sandbox_threads",
        "kata_pin_hook_seconds_sum",
        "kata_pin_apply_seconds_sum",
    }


def test_every_alert_has_a_runbook_and_a_test() -> None:
    """A page with the three headings, named by the alert; firing and quiet in promtool's tests."""
    assert {one.stem for one in RUNBOOKS.glob("*.md")} == set(ALERTS)
    tests = yaml.safe_load((ROOT / "tests/data/monitoring/rules.test.yml").read_text())["tests"]
    checked = [one for test in tests for one in test["alert_rule_test"]]
    for name, rule in ALERTS.items():
        page = (RUNBOOKS / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n")
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        assert headings == ["What it means", "What to look at", "What to do"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
        assert rule["labels"]["severity"] in {"critical", "warning"}
        outcomes = {bool(one.get("exp_alerts")) for one in checked if one["alertname"] == name}
        assert outcomes == {True, False}, name


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_a_runbook_names_what_exists(page: Path) -> None:
    """Commands, rows of `doctor`, settings, and message ids."""
    text = page.read_text()
    for command in re.findall(r"(?:^    |`)kata-pin ([a-z-]+)", text, re.MULTILINE):
        assert command in COMMANDS, command
    for rows in re.findall(r"\brows? ((?:`[\w ]+`(?: and )?)+)", text):
        assert set(re.findall(r"`([\w ]+)`", rows)) <= ROWS, rows
    logs = (ROOT / "docs/logs.md").read_text()
    for identity in re.findall(r"MESSAGE_ID=(\w+)", text):
        assert identity in logs
    for name in re.findall(r"`((?:alloc|audit|hook|metrics|history|paths|nri)\.\w+)", text):
        assert name in BY_KEY, name


def test_the_dashboard_asks_the_chosen_data_source() -> None:
    """Its panels have titles, descriptions and room of their own."""
    variables: dict[str, Any] = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(one["datasource"]["uid"] == "${datasource}" for one in panel["targets"])
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
