"""docs/monitoring with Prometheus' own programs: promtool tests the rules, and a real Prometheus
that scrapes a real daemon answers every expression of rules and dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import move_elsewhere, private_node
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "docs/monitoring"
RULES = MONITORING / "kata-pin.rules.yml"
CPUS = sorted(os.sched_getaffinity(0))

VARIABLES = {"$job": "kata-pin", "$instance": ".*", "$__rate_interval": "5s"}

RESCTRL = re.compile("kata_pin_(cache_groups|sandbox_l3_bytes|sandbox_memory_bytes_total|quiet_)")
"""Metrics that need resctrl, or `quiet: irq`; unit tests of the groups and the keeper have them."""


@cache
def program(name: str) -> str:
    """Return Debian's prometheus or promtool."""
    done = subprocess.run(
        [ROOT / "scripts/prometheus"], capture_output=True, text=True, check=True, timeout=50
    )
    return f"{done.stdout.strip()}/{name}"


def test_rules_are_valid_and_fire_when_they_should(tmp_path: Path) -> None:
    """Each alert fires on a node where it should and is quiet on one where all is well."""
    shutil.copy(RULES, tmp_path)
    shutil.copy(ROOT / "tests/data/monitoring/rules.test.yml", tmp_path)
    for kind, file in (("check", RULES.name), ("test", "rules.test.yml")):
        done = subprocess.run(
            [program("promtool"), kind, "rules", tmp_path / file],
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


THRESHOLD = re.compile(r"expr: [^\n]* > (?!0\n|1\n)([0-9.]+)\n")
"""A limit that is neither none nor one: those are counts of things, which have nothing between."""


def test_every_threshold_is_pinned(tmp_path: Path) -> None:
    """promtool's tests fail with a threshold that is a fifth lower or a quarter higher."""
    shutil.copy(ROOT / "tests/data/monitoring/rules.test.yml", tmp_path)
    rules = RULES.read_text()
    found = list(THRESHOLD.finditer(rules))
    assert len(found) >= 4
    for limit in found:
        for factor in (0.8, 1.25):
            changed = f"{float(limit[1]) * factor:g}"
            text = rules[: limit.start(1)] + changed + rules[limit.end(1) :]
            (tmp_path / RULES.name).write_text(text)
            done = subprocess.run(
                [program("promtool"), "test", "rules", tmp_path / "rules.test.yml"],
                capture_output=True, text=True, timeout=50, check=False,
            )  # fmt: skip
            assert done.returncode != 0, f"{limit[0]} with {changed}"


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        """Return what a part of the interface has."""
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def value(self, expression: str) -> list[Any]:
        """Return the samples of an expression now."""
        result: list[Any] = self.ask("query", query=expression)["result"]
        return result


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes a port of this machine every second, with our rules."""
    port = free_port()
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{RULES}]\n"
        "scrape_configs:\n"
        f"  - {{job_name: kata-pin, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
    )
    process = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        running = Prometheus(port)
        wait_for(running.ready, "Prometheus")
        yield running
    finally:
        process.terminate()
        process.wait(20)


def dashboard_expressions() -> list[str]:
    """Return the expressions of the dashboard's panels, variables filled in."""
    dashboard = json.loads((MONITORING / "kata-pin.dashboard.json").read_text())
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, expression
            found.append(expression)
    assert len(found) > 25
    return found


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.root
@pytest.mark.qemu
@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_real_prometheus_gets_what_dashboard_and_rules_ask_for(tmp_path: Path) -> None:
    """Every panel has data, every rule is healthy, and a dead daemon is an alert."""
    port = free_port()
    settings: dict[str, Any] = {
        "audit": {"affinity_s": 0.5, "deep_s": 2},
        "metrics": {"listen": f"127.0.0.1:{port}"},
        "alloc": {"policy": "annotation"},
        "memory": "migrate",
    }
    with private_node(**settings) as node, prometheus(tmp_path, port) as server:
        daemon = node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", str(CPUS[-1]), exclusive=True)
            node.wait_state("p1", "ok")
            wait_for(lambda: server.value('up{job="kata-pin"} == 1') != [], "a scrape")
            move_elsewhere(pod.kata.tids()[0], {CPUS[0]})  # counted, and moved back
            empty = {one for one in dashboard_expressions() if not RESCTRL.search(one)}

            def every_panel_has_data() -> bool:
                empty.difference_update([one for one in empty if server.value(one)])
                return not empty

            wait_for(every_panel_has_data, f"data for {empty}", 60)

            def rules_are_evaluated() -> bool:
                counted = server.value("instance:kata_pin_exclusive_cpus:count")
                rules = [one for group in server.ask("rules")["groups"] for one in group["rules"]]
                assert len(rules) > 20
                assert "err" not in {one["health"] for one in rules}, rules
                return {one["health"] for one in rules} == {"ok"} and [
                    one["value"][1] for one in counted
                ] == ["1"]

            wait_for(rules_are_evaluated, "every rule to be evaluated", 60)
        assert daemon.terminate() == 0

        def down() -> bool:
            alerts = server.ask("alerts")["alerts"]
            return any(one["labels"]["alertname"] == "KataPinDown" for one in alerts)

        wait_for(down, "the alert KataPinDown to be pending", 60)
