"""A guest's bytes, any of them: a value or a ParseError, and never more than was bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.agent import messages
from kata_pin.peers.agent.messages import parse_cpu_times, parse_cpuinfo
from kata_pin.peers.proto import agent_pb2 as pb

tables = st.dictionaries(
    st.integers(0, 8191), st.integers(0, 0xFFFFFFFE), min_size=1, max_size=50
).filter(lambda table: len(set(table.values())) == len(table))


@given(tables, st.sampled_from(["", "model name\t: apicid: 7\n", "initial apicid\t: 3\n"]))
def test_cpuinfo_survives(table: dict[int, int], between: str) -> None:
    """Every table is read back, whatever other lines there are."""
    text = "".join(f"processor\t: {c}\n{between}apicid\t\t: {a}\n\n" for c, a in table.items())
    assert dict(parse_cpuinfo(text.encode())) == table


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_metrics_survive(times: list[int]) -> None:
    """Every rank's time is read back."""
    text = "".join(
        f'kata_guest_cpu_time{{cpu="{rank}",item="user"}} {value}\n'
        for rank, value in enumerate(times)
    )
    assert [one.busy_ms for one in parse_cpu_times(text)] == times


@given(st.sets(st.integers(0, 8191), min_size=1, max_size=40))
def test_cpusets_survive(cpus: set[int]) -> None:
    """What is asked for is what the agent reads, alone."""
    data = messages.update_request("c", CpuSet(cpus))
    message = pb.UpdateContainerRequest.FromString(data)
    assert CpuSet.parse(message.resources.cpu.cpus) == CpuSet(cpus)
    message.resources.cpu.ClearField("cpus")
    assert not message.resources.cpu.ListFields()
    message.resources.ClearField("cpu")
    assert not message.resources.ListFields()
