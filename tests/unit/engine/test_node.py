"""The node's facts, at moments when a file cannot be read."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from kata_pin.base.config.tree import Config, LiveConfig, Paths
from kata_pin.engine.node import NodeWatch
from kata_pin.linux.files import HOST
from kata_pin.peers.kubelet.checkpoint import read_claims
from tests.chaos.fuzz.seeds import CDI
from tests.support.checkpoint import checkpoint


def test_a_checkpoint_that_cannot_be_read_now_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors the last one stays in use, reported once; then the new one counts."""
    file = tmp_path / "cpu_manager_state"
    node = NodeWatch(
        HOST, LiveConfig(Config(paths=Paths(kubelet_state=str(file)))), live_threads=False
    )
    file.write_text(checkpoint("0-3"))
    before = node.kubelet
    file.write_text(checkpoint("0-2", {"pod": {"app": "3"}}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert node.kubelet == before
        assert node.kubelet == before
        (note,) = node.notes
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert note.text.endswith("Too many open files; using the last valid one")
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    now = node.kubelet
    assert now is not None
    assert str(now.default) == "0-2"
    assert node.notes == ()


def test_a_checkpoint_with_half_a_character_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lone surrogate in it does not end the daemon, nor get into a text that is written."""
    file = tmp_path / "cpu_manager_state"
    node = NodeWatch(
        HOST, LiveConfig(Config(paths=Paths(kubelet_state=str(file)))), live_threads=False
    )
    file.write_text('{"policyName":"static","defaultCpuSet":"0","entries":{"\\ud800":{"a":"1"}}}')
    assert node.kubelet is None
    (note,) = node.notes
    assert "half of a surrogate pair in a key" in note.text.encode().decode()
    assert caplog.text.encode()


def test_dra_claims_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read by events and audits; a spec that is half written is reported and changes nothing."""
    folder = tmp_path / "cdi"
    paths = Paths(kubelet_state=str(tmp_path / "none"), cdi=str(folder))
    node = NodeWatch(HOST, LiveConfig(Config(paths=paths)), live_threads=False)
    assert (node.current().claims, node.read_claims(), node.notes) == ({}, False, ())
    folder.mkdir()
    spec = folder / "dra.k8s.io-cpu_claim-x.json"
    spec.write_bytes(CDI)
    (folder / "gpu.yaml").write_text("kind: x")
    assert node.changed() is False  # the first look
    ((uid, cpus),) = node.current().claims.items()
    assert (uid[:8], str(cpus)) == ("0f8f5e2a", "2-3,7")
    spec.write_bytes(CDI[:-9])
    assert node.read_claims() is False
    assert node.read_claims() is False
    (note,) = node.notes
    assert note.code == "dra-claims"
    assert len(caplog.records) == 1
    spec.unlink()
    assert node.changed() is True
    assert (node.current().claims, node.notes) == ({}, ())


def test_only_roots_specs_count(tmp_path: Path) -> None:
    """A symlink is none, and neither is a folder."""
    (tmp_path / "real").write_bytes(CDI)
    (tmp_path / "link.json").symlink_to(tmp_path / "real")
    (tmp_path / "folder.json").mkdir()
    claims, problem = read_claims(str(tmp_path))
    assert claims == {}
    assert "link.json" in problem
