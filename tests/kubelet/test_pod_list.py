"""The list of pods of a real kubelet, with the certificate that it makes itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kata_pin.model.alloc import POLICY_KEY
from tests.kubelet.recording import Setup, make_steps, play, why_not
from tests.support.certificates import certificate

CPUS = [{"cpu": cpu, "core": cpu, "socket": 0, "numa": 0, "uncore": 0} for cpu in range(4)]

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate"),
    pytest.mark.root,
    pytest.mark.timeout(180),
]


def test_annotations_of_a_real_kubelet(tmp_path: Path) -> None:
    """By address, with the node's name and a client certificate; else the error says what to do."""
    signed, key = certificate(tmp_path, "DNS:kata-pin", "-addext", "extendedKeyUsage=clientAuth")
    client = tmp_path / "client.pem"
    client.write_text(signed.read_text() + key.read_text())
    stage = tmp_path / "stage"
    (step,) = make_steps(1, 1, len(CPUS))
    step["annotations"] = {POLICY_KEY: "share", "other": "x"}
    right = {
        "url": "https://127.0.0.1:10250/pods",
        "ca": str(stage / "certificates" / "kubelet.crt"),
        "name": "node",
        "certificate": str(client),
    }
    requests = [right, {**right, "name": ""}, {**right, "ca": ""}, {**right, "certificate": ""}]
    answered = play(stage, CPUS, Setup("0"), [step], client_ca=str(signed), lists=requests)
    good, other_name, other_ca, nobody = answered["lists"]
    assert good == {"pods": {step["pod"]: {POLICY_KEY: "share"}}}
    assert "IP address mismatch" in other_name["error"]
    assert "set alloc.pods_name to the node's name" in other_name["error"]
    assert "self-signed certificate" in other_ca["error"]
    assert "/var/lib/kubelet/pki/kubelet.crt" in other_ca["error"]
    assert "HTTP 401 (its token or client certificate is not accepted" in nobody["error"]
