"""Overrides of pods' CPU classes, and the kubelet's list of pods: any text, and round trips."""

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.orders import is_pod, parse_orders, render_orders

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)
pods = names | st.builds("{}/{}".format, names, names)


@given(st.dictionaries(pods, st.sampled_from(CpuClass), max_size=20))
def test_written_orders_read_back(given_orders: dict[str, CpuClass]) -> None:
    """What is written is what is read, for every name that a pod can have."""
    assert all(map(is_pod, given_orders))
    assert parse_orders(render_orders(given_orders)) == given_orders
