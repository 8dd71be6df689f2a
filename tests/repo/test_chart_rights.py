"""The image is tested with the rights that the chart gives its daemon."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.podrights import CAPABILITIES, OPTIONS

MANIFEST = Path(__file__).parents[2] / "hooks/charts/kata-pin.yaml"


def test_podman_gives_what_the_chart_gives() -> None:
    """Options of podman stand for fields of the pod; none is wider."""
    manifests = yaml.safe_load_all(MANIFEST.read_text())
    (pod,) = (
        one["spec"]["template"]["spec"] for one in manifests if one and one["kind"] == "DaemonSet"
    )
    (daemon,) = (one for one in pod["containers"] if one["name"] == "daemon")
    rights = daemon["securityContext"]
    assert (pod["hostPID"], pod["hostNetwork"]) == (True, True)
    assert rights["capabilities"] == {"drop": ["ALL"], "add": list(CAPABILITIES)}
    assert (rights["readOnlyRootFilesystem"], "--read-only" in OPTIONS) == (True, True)
    assert (rights["allowPrivilegeEscalation"], "no-new-privileges" in OPTIONS) == (False, True)
    assert (rights["privileged"], "--privileged" in OPTIONS) == (False, False)
    for profile in ("seccomp", "appArmor"):
        assert rights[f"{profile}Profile"] == {"type": "Unconfined"}
        assert f"{profile.lower()}=unconfined" in OPTIONS
