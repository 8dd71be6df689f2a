"""The policy that the configuration names: ours, another package's, none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from kata_pin.base.errors import ConfigError
from kata_pin.options.allocation.checked_policy import make_policy
from tests.support.allotted import settings
from tests.support.world import flat


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with policies: one that works, and some that do not."""
    (tmp_path / "strange_policies.py").write_text(
        "from kata_pin.options.allocation.policies import BUILTIN\n"
        "def works(topology, settings):\n    return BUILTIN['static'](topology, settings)\n"
        "def breaks(topology, settings):\n    raise ValueError('no such luck')\n"
    )
    info = tmp_path / "strange-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kata_pin.policies]\nworks = strange_policies:works\nbreaks = strange_policies:breaks\n"
        "absent = strange_policies:nothing\nstatic = strange_policies:breaks\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "strange" in {one.name for one in distributions(path=[str(tmp_path)])}
    yield tmp_path
    sys.modules.pop("strange_policies", None)


@pytest.mark.parametrize("name", ["static", "annotation", "topology"])
def test_ours(name: str) -> None:
    """The three of this project, by name."""
    assert make_policy(settings(policy=name), flat(4)).name == name


def test_another_packages(package: Path) -> None:
    """A third one comes by entry point, and never in the place of ours."""
    assert make_policy(settings(policy="works"), flat(4)).name == "static"
    assert make_policy(settings(policy="static"), flat(4)).name == "static"
    assert str(package / "strange_policies.py") == sys.modules["strange_policies"].__file__


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("breaks", "cannot be made: no such luck"),
        ("absent", "cannot be loaded"),
        ("crane", "unknown policy 'crane'; known: "),
    ],
)
@pytest.mark.usefixtures("package")
def test_what_goes_wrong_is_a_wrong_setting(name: str, said: str) -> None:
    """Whatever another package does is reported and ends nothing."""
    with pytest.raises(ConfigError, match=said):
        make_policy(settings(policy=name), flat(4))
