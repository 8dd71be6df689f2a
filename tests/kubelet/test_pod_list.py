"""The list of pods of a real kubelet, with the certificate that it makes itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kata_pin.base.allocation import POLICY_KEY
from tests.kubelet.recording import Setup, make_steps, play
from tests.support.certificates import certificate

CPUS = [{"cpu": cpu, "core": cpu, "socket": 0, "numa": 0, "uncore": 0} for cpu in range(4)]

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate"),
    pytest.mark.root,
    pytest.mark.timeout(180),
]


def test_a_certificate_that_does_not_fit(tmp_path: Path, release: str) -> None:
    """By address without the node's name, or without the kubelet's CA: the error says what to do.

    What a list has in it, and who may read it: tests/contract/test_pod_list.py.
    """
    signed, key = certificate(tmp_path, "DNS:kata-pin", "-addext", "extendedKeyUsage=clientAuth")
    client = tmp_path / "client.pem"
    client.write_text(signed.read_text() + key.read_text())
    stage = tmp_path / "stage"
    (step,) = make_steps(1, 1, len(CPUS))
    right = {
        "url": "https://127.0.0.1:10250/pods",
        "ca": str(stage / "certificates" / "kubelet.crt"),
        "name": "node",
        "certificate": str(client),
    }
    requests = [{**right, "name": ""}, {**right, "ca": ""}]
    more = {"client_ca": str(signed), "lists": requests}
    answered = play(stage, CPUS, Setup("0"), [step], release, **more)
    other_name, other_ca = answered["lists"]
    assert "IP address mismatch" in other_name["error"]
    assert "set alloc.pods_name to the node's name" in other_name["error"]
    assert "self-signed certificate" in other_ca["error"]
    assert "/var/lib/kubelet/pki/kubelet.crt" in other_ca["error"]


def test_the_pods_api_of_a_real_kubelet(tmp_path: Path, newest: str) -> None:
    """Its socket lists the pods of the port without authentication, with their annotations."""
    (step,) = make_steps(1, 1, len(CPUS))
    annotated = {**step, "annotations": {POLICY_KEY: "exclusive"}}
    requests = [
        {"path": "/var/lib/kubelet/pods-api/pods-api.sock"},
        {"url": "http://127.0.0.1:10255/pods"},
    ]
    answered = play(tmp_path / "stage", CPUS, Setup("0"), [annotated], newest, lists=requests)
    by_socket, by_port = answered["lists"]
    assert by_socket == by_port
    ((_uid, annotations),) = by_socket["pods"].items()
    assert annotations == {POLICY_KEY: "exclusive"}
