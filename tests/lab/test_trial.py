"""What `scripts/lab test` needs beside the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.lab.errors import EX_NOT_BUILT, NotBuiltError
from tests.lab.flavours import DEFAULT, flavour
from tests.lab.settings import Settings
from tests.lab.trial import Trial


def test_a_kubelet_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Go, and without one from before: not run, with the reason; nothing is booted."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "dirname", "sed", "cat", "sha256sum", "cut"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trial = Trial(Settings.read(), flavour(DEFAULT), lambda _: None, tmp_path)
    with pytest.raises(NotBuiltError, match="scripts/kubelet cannot build") as raised:
        trial._script("kubelet")
    assert raised.value.exit_code == EX_NOT_BUILT
