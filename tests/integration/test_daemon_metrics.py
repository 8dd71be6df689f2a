"""Metrics of a real daemon, read through its real socket and by Prometheus' own parser."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.daemon import Node, move_elsewhere, private_node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.qemu]

CPUS = sorted(os.sched_getaffinity(0))


def _scrape(node: Node, address: tuple[str, int] | None = None) -> list[Sample]:
    """Ask as Prometheus does; return every sample."""
    family = socket.AF_UNIX if address is None else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(10)
        wait_for(lambda: "metrics: " in node.log, "metrics to be served")
        peer.connect(address or str(node.runtime_dir / "metrics.sock"))
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: node\r\nAccept: */*\r\n\r\n")
        answer = b"".join(iter(lambda: peer.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"text/plain; version=0.0.4" in head
    families = list(text_string_to_metric_families(body.decode()))
    assert len({one.name for one in families}) == len(families)
    return [sample for one in families for sample in one.samples]


def _value(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Return the sum of the samples of a name that have these labels."""
    return sum(
        one.value for one in samples if one.name == name and labels.items() <= one.labels.items()
    )


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_what_is_scraped_is_what_there_is() -> None:
    """Threads, claims of pCPUs, passes, hooks and audits; no label names a pod or a thread."""
    with private_node(audit={"affinity_s": 0.2, "deep_s": 3600}) as node:
        node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", str(CPUS[-1]), exclusive=True)
            shown = node.wait_state("p1", "ok")
            wait_for(
                lambda: any(s.name.startswith("kata_pin_last_audit") for s in _scrape(node)),
                "an audit",
            )
            samples = _scrape(node)
            assert _value(samples, "kata_pin_sandboxes") >= 1
            assert _value(samples, "kata_pin_threads") >= len(shown["threads"])
            vcpus = [thread for thread in shown["threads"] if thread["role"] == "vcpu"]
            assert _value(samples, "kata_pin_threads", role="vcpu", state="ok") >= len(vcpus)
            assert _value(samples, "kata_pin_cpu_claims", cpu=str(CPUS[-1])) >= 1
            assert _value(samples, "kata_pin_apply_seconds_count") >= 1
            assert 0 < _value(samples, "kata_pin_apply_seconds_sum") < 60
            assert _value(samples, "kata_pin_hook_seconds_count") == 2
            assert _value(samples, "kata_pin_hook_seconds_bucket", le="+Inf") == 2
            assert 0 < _value(samples, "kata_pin_hook_seconds_sum") < 60
            assert _value(samples, "kata_pin_build_info") == 1
            audit = _value(samples, "kata_pin_last_audit_timestamp_seconds")
            assert time.time() - 60 < audit <= time.time()
            assert pod.id not in str(samples)

            before = _value(samples, "kata_pin_drift_total")
            assert before == 0, "a first placement is no drift"
            placed = _value(samples, "kata_pin_thread_changes_total")
            assert placed >= len(vcpus)
            assert _value(samples, "kata_pin_violations", kind="intruder") >= 1
            assert _value(samples, "kata_pin_violations", kind="drift") == 0
            mine = {"cpu": str(CPUS[-1])}
            assert _value(samples, "kata_pin_interrupts_total", kind="tick", **mine) > 0
            assert "# TYPE kata_pin_violations gauge" in node.cli("metrics").stdout
            wait_for(
                lambda: any(
                    one.name == "kata_pin_vcpu_run_seconds_total" and one.labels == mine
                    for one in _scrape(node)
                ),
                "two looks of the watch",
            )
            move_elsewhere(pod.kata.tids()[0], {CPUS[0]})
            wait_for(
                lambda: _value(_scrape(node), "kata_pin_drift_total") > before, "drift to count"
            )
        wait_for(lambda: node.sandboxes() == {}, "the end of the sandbox")
        assert _value(_scrape(node), "kata_pin_cpu_claims", cpu=str(CPUS[-1])) in {0, 1}


def test_who_may_ask() -> None:
    """The socket is as open as that of the state; a loopback port serves the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with private_node() as node:
        daemon = node.start()
        wait_for(lambda: "metrics: unix" in node.log, "the socket to be served")
        mode = stat.S_IMODE(os.stat(node.runtime_dir / "metrics.sock").st_mode)
        assert mode == stat.S_IMODE(os.stat(node.runtime_dir / "status.sock").st_mode)
        assert daemon.terminate() == 0
        assert not (node.runtime_dir / "metrics.sock").exists()
        node.configure(metrics={"listen": f"127.0.0.1:{port}"})
        daemon = node.start()
        wait_for(lambda: "metrics: http" in node.log, "the port to be served")
        assert _value(_scrape(node, ("127.0.0.1", port)), "kata_pin_build_info") == 1
        assert not (node.runtime_dir / "metrics.sock").exists()
        assert daemon.terminate() == 0
        node.configure(metrics={"listen": "0.0.0.0:80"})
        refused = node.cli("config", "check")
        assert refused.returncode == 78
        assert re.search(r"metrics\.listen.*not a loopback address", refused.stderr)


def test_without_metrics_their_library_is_not_loaded() -> None:
    """Who does not want them does not pay for them, nor does the command line."""
    service, cli = "kata_pin.service", "kata_pin.cli"
    modules = f"{service}.app, {service}.offline, {cli}.main, {cli}.commands.show"
    code = f"import sys, {modules}; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=30)
    assert done.stdout == b"False\n"
    with private_node(metrics={"listen": "none"}) as node:
        daemon = node.start()
        assert not (node.runtime_dir / "metrics.sock").exists()
        assert daemon.terminate() == 0
