"""What is read of a kubelet's list of pods: over the double, and over a real kubelet where one is.

The double knows a token, the real kubelet a client certificate: both are a credential here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.allocation import POLICY_KEY
from tests.kubelet.recording import Setup, make_steps, play, why_not
from tests.kubelet.stage import pod_list
from tests.support.certificates import certificate
from tests.support.kubeletpods import TOKEN, playing_kubelet

CPUS = [{"cpu": cpu, "core": cpu, "socket": 0, "numa": 0, "uncore": 0} for cpu in range(4)]
(STEP,) = make_steps(1, 1, len(CPUS))
ANNOTATIONS = {POLICY_KEY: "share", "other": "x"}

Answers = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(180)


def of_the_double(folder: Path) -> Answers:
    """Return what the double says to who has a credential, and to who has none."""
    token = folder / "token"
    token.write_text(TOKEN)
    with playing_kubelet() as kubelet:
        kubelet.pods = {STEP["pod"]: ANNOTATIONS}
        right = {"url": kubelet.url(), "token": str(token)}
        return [pod_list(right), pod_list({"url": kubelet.url()})]


def of_a_kubelet(folder: Path) -> Answers:
    """Return the same of a real one."""
    signed, key = certificate(folder, "DNS:kata-pin", "-addext", "extendedKeyUsage=clientAuth")
    client = folder / "client.pem"
    client.write_text(signed.read_text() + key.read_text())
    right = {
        "url": "https://127.0.0.1:10250/pods",
        "ca": str(folder / "stage" / "certificates" / "kubelet.crt"),
        "name": "node",
    }
    lists = [{**right, "certificate": str(client)}, right]
    step = {**STEP, "annotations": ANNOTATIONS}
    played = play(folder / "stage", CPUS, Setup("0"), [step], client_ca=str(signed), lists=lists)
    answers: Answers = played["lists"]
    return answers


REAL = pytest.param(
    of_a_kubelet,
    marks=[
        pytest.mark.peer,
        pytest.mark.root,
        pytest.mark.skipif(bool(why_not()), reason=why_not()),
        pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes certificates"),
    ],
    id="kubelet",
)


@pytest.mark.parametrize("ask", [pytest.param(of_the_double, id="double"), REAL])
def test_who_may_list_pods(ask: Any, tmp_path: Path) -> None:
    """With a credential kata-pin's annotations by uid, without one the same refusal."""
    allowed, refused = ask(tmp_path)
    assert allowed == {"pods": {STEP["pod"]: {POLICY_KEY: "share"}}}
    assert "HTTP 401 (its token or client certificate is not accepted" in refused["error"]
