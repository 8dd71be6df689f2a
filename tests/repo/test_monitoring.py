"""Dashboard, rules and runbooks agree with the metrics, and with each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kata_pin.base.config.table import BY_KEY, SECTIONS
from kata_pin.base.documents.check import FINDINGS
from kata_pin.cli.quick import COMMANDS
from tests.support.report_docs import metric_rows

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "docs/monitoring"
RUNBOOKS = ROOT / "docs/runbooks"

GROUPS = yaml.safe_load((MONITORING / "kata-pin.rules.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
DASHBOARD = json.loads((MONITORING / "kata-pin.dashboard.json").read_text())
ROWS = {
    name
    for folder in ("cli/doctor", "options")
    for file in (ROOT / "kata_pin" / folder).rglob("*.py")
    for name in re.findall(r'\bRow\(\s*"([^"]+)"', file.read_text())
}
"""The checks of `doctor`."""

NO_SETTINGS = {"system.slice", "fs.inotify.max_queued_events"}
"""What runbooks name that looks like a setting: a unit, a value of sysctl."""

SCRAPE = {"up", "job", "instance"}
"""What Prometheus adds itself."""


METRICS = [row for rows in metric_rows().values() for row in rows]


def known() -> dict[str, set[str]]:
    """Return the labels of each metric, by the names of its samples."""
    found = {}
    for row in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if row.times else ("",)
        for suffix in suffixes:
            found[row.name + suffix] = {*row.labels} | ({"le"} if suffix == "_bucket" else set())
    return found


def test_every_metric_has_words() -> None:
    """Sentences: docs/metrics.md is made of them. No two have one name."""
    texts = [text for row in METRICS for text in (row.help, row.more) if text]
    assert [text for text in texts if len(text.split()) < 2 or not text.endswith(".")] == []
    assert len({row.name for row in METRICS}) == len(METRICS) > 30


def expressions() -> Iterator[str]:
    """Yield every expression."""
    yield from (rule["expr"] for rule in RULES)
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    """As the rows have them."""
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
    checked = [one for test in tests for one in test.get("alert_rule_test", [])]
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
    keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(: [^`]*)?`", text)
    written = {name for name, value in keys if value or "." in name}
    assert written <= {*BY_KEY, *SECTIONS, *NO_SETTINGS}


def no_settings(text: str) -> set[str]:
    """Return what a text calls a setting, also in one word or in braces, and is none."""
    lists = re.findall(r"\bsettings? ((?:`[\w.]+`(?:,| and| or)? ?)+)", " ".join(text.split()))
    named = {name for words in lists for name in re.findall(r"`([\w.]+)`", words)}
    for section, values in re.findall(r"`(\w+): (\{[^`]*\})", text):
        if section in SECTIONS:
            named |= {f"{section}.{key}" for key in yaml.safe_load(values)}
    return named - {*BY_KEY, *SECTIONS}


def test_what_is_called_a_setting_is_one() -> None:
    """In runbooks, and in every other document."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert {page.name: wrong for page in pages if (wrong := no_settings(page.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("the setting\n`hypervisor` lists", {"hypervisor"}),
        ("settings `mode`, `quiett` and `audit.deep`", {"quiett", "audit.deep"}),
        ("the setting `overhead`, or `mode`; `other` is none", set()),
        ("with `guest: {enabled: off, nope: 1}` and `limits: {a: 1}`", {"guest.nope"}),
    ],
)
def test_a_wrong_setting_is_found(text: str, wrong: set[str]) -> None:
    """Across the end of a line, and in lists."""
    assert no_settings(text) == wrong


def test_every_finding_has_words() -> None:
    """docs/json.md, docs/metrics.md and docs/schema are made of them."""
    for row in FINDINGS:
        texts = [row.about, *filter(None, [row.counted, row.remedy])]
        texts += row.nouns
        assert [text for text in texts if not text or text.endswith(".")] == [], row.kind
    assert len({row.kind for row in FINDINGS}) == len({row.about for row in FINDINGS})


def test_every_alert_is_in_the_table() -> None:
    """With its severity and its page; docs/monitoring/README.md lists no other."""
    text = (MONITORING / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(\.\./runbooks/(\w+)\.md\) \| (\w+) \|", text, re.MULTILINE)
    wanted = {name: (name, rule["labels"]["severity"]) for name, rule in ALERTS.items()}
    assert {name: (page, severity) for name, page, severity in rows} == wanted
    assert len(rows) == len(ALERTS)


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
