"""A guest's /proc/cpuinfo and status."""

from __future__ import annotations

from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers.agent.messages import MAX_CPUINFO, MAX_STATUS, parse_allowed, parse_cpuinfo

PLUGGED = b"""\
processor\t: 0
vendor_id\t: AuthenticAMD
apicid\t\t: 0
initial apicid\t: 0
bugs\t\t: apicid : 7

processor\t: 3
apicid\t\t: 15
initial apicid\t: 15

"""


def test_cpus_and_apic_ids() -> None:
    """Numbers need not be dense, and `initial apicid` is another field."""
    assert dict(parse_cpuinfo(PLUGGED)) == {0: 0, 3: 15}


def test_this_machines_own() -> None:
    """A real file is read: as many CPUs as are online, each with another APIC id."""
    data = Path("/proc/cpuinfo").read_bytes()
    if b"\napicid" not in data:
        pytest.skip("not x86")
    online = CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text())
    assert CpuSet(parse_cpuinfo(data)) == online


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"processor\t: 0\n",
        b"apicid\t: 0\n",
        b"processor\t: 0\nprocessor\t: 1\napicid\t: 1\n",
        b"processor\t: 0\napicid\t: 0\napicid\t: 1\n",
        b"processor\t: 0\napicid\t: 0\nprocessor\t: 0\napicid\t: 1\n",
        b"processor\t: 0\napicid\t: 0\nprocessor\t: 1\napicid\t: 0\n",
        b"processor\t: 9000\napicid\t: 0\n",
        b"processor\t: 0\napicid\t: 4294967295\n",
        b"processor\t: -1\napicid\t: 0\n",
        b"processor\t: 0x1\napicid\t: 0\n",
        b"processor\t: " + b"9" * 5000 + b"\napicid\t: 0\n",
        b"\n" * (MAX_CPUINFO + 1),
    ],
)
def test_what_is_no_cpuinfo(data: bytes) -> None:
    """A CPU without an id, two with one, numbers that cannot be: nothing of it is believed."""
    with pytest.raises(ParseError):
        parse_cpuinfo(data)


def test_allowed_cpus() -> None:
    """The list of a status file; this process's own is read too."""
    text = b"Name:\tcat\nCpus_allowed:\tff\nCpus_allowed_list:\t1,3-4\nMems_allowed_list:\t0\n"
    assert parse_allowed(text) == CpuSet.parse("1,3-4")
    assert parse_allowed(Path("/proc/self/status").read_bytes())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"Cpus_allowed_list:\n",
        b"Cpus_allowed_list:\t0-99999\n",
        b"Cpus_allowed_list:\t\xff\n",
        b" Cpus_allowed_list:\t0\n",
        b"x" * (MAX_STATUS + 1),
    ],
)
def test_what_is_no_status(data: bytes) -> None:
    """No list, an empty one, one of CPUs that cannot be."""
    with pytest.raises(ParseError):
        parse_allowed(data)
