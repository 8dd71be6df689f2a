"""The plain manifests against the schemas of the oldest Kubernetes that is supported, offline."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ROOT / "hooks" / "charts"
OLDEST = "1.30"
"""Also the newest whose schemas kubectl-validate has in itself."""


def program() -> Path:
    """Return kubectl-validate, built or not."""
    command = [str(ROOT / "scripts" / "validate"), "--where"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "validate"


pytestmark = pytest.mark.skipif(
    not program().exists(), reason="no kubectl-validate here: scripts/validate builds it"
)


def validate(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Validate one file, with our own CustomResourceDefinition, and without any cluster."""
    crds = folder / "crds"
    crds.mkdir()
    shutil.copy(CHARTS / "kata-pin" / "files" / "nodeplacements.yaml", crds)
    return subprocess.run(
        [program(), file, "--version", OLDEST, "--local-crds", crds],
        capture_output=True, text=True, check=False, timeout=50, env={"HOME": str(folder)},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["kata-pin.yaml", "kata-pin-undo.yaml"])
def test_manifests_are_valid(name: str, tmp_path: Path) -> None:
    """Every field exists and has the right type."""
    done = validate(CHARTS / name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelt_field_is_found(tmp_path: Path) -> None:
    """The check above can fail."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((CHARTS / "kata-pin.yaml").read_text().replace("hostPID:", "hostPIDs:"))
    done = validate(wrong, tmp_path)
    assert done.returncode != 0
    assert "spec.template.spec.hostPIDs" in done.stdout + done.stderr


def test_the_version_is_the_documented_one() -> None:
    """docs/cluster.md says which Kubernetes is the oldest."""
    assert f"Kubernetes {OLDEST} or newer" in (ROOT / "docs" / "cluster.md").read_text()
