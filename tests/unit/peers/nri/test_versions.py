"""Which runtimes may be sent unsolicited updates."""

from __future__ import annotations

import pytest

from kata_pin.peers.nri.messages import Configuration, updates_problem


def _problem(version: str, *, runtime: str = "containerd", nri: str = "") -> str:
    return updates_problem(Configuration(runtime, version, 2.0, nri))


@pytest.mark.parametrize(
    "version",
    ["v2.4.0", "2.4.0", "2.4.0+k3s1", "v2.4.2", "2.4.1~ds1", "v2.5.0-beta.0", "2.10.0", "v3.0.0"],
)
def test_releases_with_the_fix(version: str) -> None:
    """containerd from 2.4.0 on, also as distributions call it."""
    assert _problem(version) == ""
    assert _problem(version, nri="v0.12.3") == ""


@pytest.mark.parametrize(
    "version",
    [
        *("v1.7.24~ds1", "1.7.27", "v2.0.5", "v2.3.4", "v2.3.7", "2.3.99"),
        *("2.4.0-rc.1", "v2.4.0-beta.0", "2.4.0~ds1", "2.4.0.m", "v0.99.99"),
    ],
)
def test_releases_without_the_fix(version: str) -> None:
    """Everything before 2.4.0, and what comes before that very release."""
    assert "can deadlock" in _problem(version) or "not understood" in _problem(version)
    assert _problem(version, nri="v0.12.3") != ""


@pytest.mark.parametrize(
    "version",
    [
        *("", "v", "2", "2.4", "latest", "v2.4.x", "2.4.0 ", "99999.1.1"),
        *("\u0662.4.0", "2.4.0-" + "9" * 200),
    ],
)
def test_what_is_no_version(version: str) -> None:
    """Nothing is sent to a runtime whose version is not understood."""
    assert _problem(version) == "cannot read containerd's version"


@pytest.mark.parametrize("runtime", ["cri-o", "CRI-O", "", "Containerd", "containerd2"])
def test_other_runtimes(runtime: str) -> None:
    """Of other runtimes nothing is known, whatever their version."""
    assert "only containerd" in _problem("v9.9.9", runtime=runtime)


@pytest.mark.parametrize(
    ("nri", "safe"),
    [
        *(("v0.12.1", True), ("v0.12.0", False), ("v0.11.0", False), ("v0.12.1-rc.1", False)),
        *(("unknown", True), ("", True), ("(devel)", True), ("v1.0.0", True)),
    ],
)
def test_the_library_that_the_runtime_has(nri: str, safe: bool) -> None:
    """A build with an older NRI is not safe; without NRI's version, the runtime's counts."""
    assert (_problem("v2.4.0", nri=nri) == "") is safe
