"""A VMM that is not accepted: nothing of it is touched, and nothing about it is lost."""

from __future__ import annotations

import os

import pytest

from tests.support.daemon import Node
from tests.support.vmmhost import lookalike

pytestmark = pytest.mark.root


def test_a_refused_vmm_is_shown_and_its_records_stay(node: Node) -> None:
    """An executable that nobody allowed is the administrator's to allow: also after a restart."""
    p2 = node.id_of("p2")
    annotations = {"io.kubernetes.cri.container-type": "sandbox"}
    node.bundle(p2, {"annotations": annotations, "linux": {"resources": {"cpu": {"cpus": "1"}}}})
    daemon = node.start()
    with lookalike("-name", f"sandbox-{p2}", "-smp", "2") as process:
        before = os.sched_getaffinity(process.pid)
        run = node.hook("createRuntime", p2, process.pid)
        assert "unpinned" in run.stderr
        assert "not on the allow-list" in node.wait_state("p2", "no-vmm")["vmm_problem"]
        daemon.kill()
        node.start()
        node.wait_state("p2", "no-vmm")
        assert str(node.registered()[p2].cpus) == "1"
        assert os.sched_getaffinity(process.pid) == before
