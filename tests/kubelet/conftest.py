"""The releases of the kubelet that the tests here run."""

from __future__ import annotations

import pytest

from tests.kubelet.recording import NEWEST, why_not

BOTH = [
    pytest.param(
        release,
        id=release or "go.mod",
        marks=pytest.mark.skipif(bool(why_not(release)), reason=why_not(release)),
    )
    for release in ("", NEWEST)
]


@pytest.fixture(params=BOTH)
def release(request: pytest.FixtureRequest) -> str:
    """The release of go.mod, and the newest one: `play` takes it."""
    return str(request.param)


@pytest.fixture(params=BOTH[1:])
def newest(request: pytest.FixtureRequest) -> str:
    """The newest release alone, for what older ones do not have."""
    return str(request.param)
