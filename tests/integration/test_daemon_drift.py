"""Threads that others move, settings that change: repaired, backed off from, shown."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from tests.support.daemon import Json, Node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]


def _thread(node: Node, tid: int) -> dict[str, object]:
    return next(t for t in node.sandboxes()["p1"]["threads"] if t["tid"] == tid)


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs")
def test_a_moved_thread_is_shown_before_the_next_audit(node: Node) -> None:
    """Affinities are read when they are asked for: moved by hand is drift at once."""
    node.configure(audit={"affinity_s": 300, "deep_s": 600})
    node.start()
    with node.pod("p1") as pod:
        pod.announce()
        pod.create("c1", "1")
        pod.wait_placed({1})
        victim = pod.kata.vcpus()[0]
        wait_for(lambda: node.sandboxes()["p1"]["checked_s"] > 3, "the last pass to be over")
        os.sched_setaffinity(victim, {0})
        shown = _thread(node, victim)
        assert (shown["affinity"], shown["state"]) == ("0", "drift")
        assert node.sandboxes()["p1"]["state"] == "drift"
        checked = node.cli("check")
        assert checked.returncode == 3
        said = " ".join(checked.stdout.split())
        assert "FAIL: 1 drifting thread" in said
        assert f"tid {victim}" in said
        assert "expected on 1" in said
        explained = node.cli("explain", str(node.sandboxes()["p1"]["id"])).stdout
        assert "affinity 0, expected 1" in " ".join(explained.split())
        assert os.sched_getaffinity(victim) == {0}, "nothing was repaired meanwhile"


def test_a_refused_reload_is_shown_until_one_is_accepted(node: Node) -> None:
    """By the command that reloads, doctor, `config show --running`, history and a metric."""
    node.start()
    good = node.config.read_text()
    node.config.write_text(f"version: 1\nruntime_dir: {node.runtime_dir}\nmode: acct\n")
    refused = node.cli("reload")
    assert refused.returncode == 1
    assert "configuration not reloaded: " in refused.stderr
    assert "mode: expected one of act, observe" in refused.stderr
    for words in (f"{node.config}: mode: expected one of", "the former one is in force: "):
        rows = {row["check"]: row for row in _json(node, "doctor")["rows"]}
        named = rows["configuration" if "force" not in words else "reload"]
        assert named["status"] == "fail"
        assert words in named["text"]
    running = _json(node, "config", "show", "--running")
    assert (running["running"], running["settings"]["mode"]) == (True, "act")
    assert "mode: expected one of" in running["refused"]["error"]
    shown = node.cli("config", "show", "--running", "--changed").stdout
    assert shown.startswith("# reload refused at 2")
    assert f"runtime_dir: {node.runtime_dir}" in shown
    (event,) = _json(node, "history")["events"]
    assert event["kind"] == "reload-refused"
    wait_for(lambda: "kata_pin_config_refused 1.0" in _scrape(node), "the metric")
    assert 'kata_pin_node_events_total{kind="reload-refused"} 1.0' in _scrape(node)
    node.config.write_text(good)
    assert node.cli("reload").returncode == 0
    assert [row for row in _json(node, "doctor")["rows"] if row["check"] == "reload"] == []
    assert _json(node, "config", "show", "--running")["refused"] is None
    wait_for(lambda: "kata_pin_config_refused 0.0" in _scrape(node), "the metric")
    kinds = [one["kind"] for one in _json(node, "history")["events"]]
    assert kinds == ["reload-refused", "reloaded"]


def _json(node: Node, *arguments: str) -> Json:
    found: Json = json.loads(node.cli(*arguments, "--json").stdout)
    return found


def _scrape(node: Node) -> str:
    """Return the metrics; an answer is reused for a while."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(node.runtime_dir / "metrics.sock"))
        peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: peer.recv(65536), b"")).decode()


def test_sigint_ends_like_sigterm(node: Node) -> None:
    """Ctrl-C in a terminal ends the daemon as the service manager does."""
    daemon = node.start()
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(2) == 0
