"""The CDI specs that the DRA driver for CPUs writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers.kubelet.checkpoint import KIND, MAX_BYTES, parse_claims, read_claims
from kata_pin.rights.calls import Calls
from tests.support.world import cpus

UID = "0f8f5e2a-6b1c-4a55-9a51-0d1a6a1e7c11"
OTHER = "7d3c4f0e-11aa-4b0e-8f55-aabbccddeeff"


def _spec(*lines: Any, kind: str = KIND) -> bytes:
    devices = [{"name": "claim", "containerEdits": {"env": [line]}} for line in lines]
    return json.dumps({"cdiVersion": "0.8.0", "kind": kind, "devices": devices}).encode()


def test_the_claims_of_a_spec() -> None:
    """One per file today, all in one file in the driver's first versions."""
    data = _spec(f"DRA_CPUSET_{UID}=2-3,7", f"DRA_CPUSET_{OTHER}=5")
    assert parse_claims(data) == {UID: cpus("2-3,7"), OTHER: cpus("5")}


@pytest.mark.parametrize(
    "data",
    [
        _spec(f"DRA_CPUSET_{UID}=2", kind="nvidia.com/gpu"),
        _spec("DRA_CPUSET_ASSIGNED=2", "PATH=/bin", f"DRA_CPUSET_{UID}=", 7),
        _spec(f"DRA_CPUSET_{UID}=dynamic"),
        _spec(),
    ],
)
def test_what_names_no_cpus(data: bytes) -> None:
    """Specs of other kinds, other variables, values that are no list."""
    assert parse_claims(data) == {}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"kind": "dra.k8s.io/cpu", "devices": 1}', b" " * (MAX_BYTES + 1)]
)
def test_a_damaged_spec(data: bytes) -> None:
    """It is refused as a whole, as one that is half written."""
    with pytest.raises(ParseError):
        parse_claims(data)


class _Ending(Calls):
    """A node on which a claim ends between the list and the look."""

    def listdir(self, path: str) -> list[str]:
        return [*super().listdir(path), "ended.json"]


def test_a_claim_that_ends_meanwhile(tmp_path: Path) -> None:
    """Its spec is gone: that is no problem, and hides no other."""
    (tmp_path / "one.json").write_bytes(_spec(f"DRA_CPUSET_{UID}=2-3"))
    assert read_claims(str(tmp_path), _Ending()) == ({UID: cpus("2-3")}, "")
