"""CustomResourceDefinitions of others, as their own Go modules have them (checked by Go's sums).

cluster.kubectl("apply", "--server-side", "-f", str(definition("podmonitors")))
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import SCALE

_OPERATOR: Final = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
_OPENSHIFT: Final = "github.com/openshift/api@v0.0.0-20240124164020-e2ce40831f2e"
_TOPOLOGY: Final = "github.com/k8stopologyawareschedwg/noderesourcetopology-api@v0.1.2"

_FILES: Final = {
    "podmonitors": (
        _OPERATOR, "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "prometheusrules": (
        _OPERATOR, "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "securitycontextconstraints": (
        _OPENSHIFT, "security/v1/0000_03_security-openshift_01_scc.crd.yaml",
    ),
    "noderesourcetopologies": (_TOPOLOGY, "manifests/crd.yaml"),
}  # fmt: skip

DEFINITIONS: Final = tuple(_FILES)


def definition(name: str) -> Path:
    """Return the file of a definition, by its plural; skips where Go cannot get it."""
    module, path = _FILES[name]
    if shutil.which("go") is None:
        pytest.skip(f"no Go here, which gets {module}")
    done = subprocess.run(
        ["go", "mod", "download", "-json", module],
        cwd="/", capture_output=True, text=True, check=False, timeout=100 * SCALE,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{module} cannot be had: {done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"]) / path
