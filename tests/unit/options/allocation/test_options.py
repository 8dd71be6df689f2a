"""The static policy's options: what is read, what is refused."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ConfigError
from kata_pin.options.allocation.accumulator import Machine
from kata_pin.options.allocation.demand import StaticOptions
from tests.support.machines import Shape, host
from tests.support.world import flat

NAMES = [
    "full-pcpus-only",
    "strict-cpu-reservation",
    "distribute-cpus-across-numa",
    "prefer-align-cpus-by-uncorecache",
    "align-by-socket",
    "distribute-cpus-across-cores",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("text", "value"), [("true", True), ("T", True), ("0", False)])
def test_option_is_read(name: str, text: str, value: bool) -> None:
    """Each option of the kubelet is known, with Go's texts for booleans."""
    options = StaticOptions.parse({name: text})
    assert getattr(options, name.replace("-", "_")) is value
    assert StaticOptions.parse({}) == StaticOptions()


@pytest.mark.parametrize(("name", "text"), [("full-cpus", "true"), ("align-by-socket", "yes")])
def test_unknown_is_refused(name: str, text: str) -> None:
    """An unknown option or a text that is no boolean stops the start and is named."""
    with pytest.raises(ConfigError, match=name):
        StaticOptions.parse({name: text})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("full-pcpus-only", "distribute-cpus-across-cores"),
        ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
        ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
        ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
    ],
)
def test_pairs_that_exclude_each_other(one: str, other: str) -> None:
    """The kubelet's four refused pairs are refused, each option alone is not."""
    with pytest.raises(ConfigError, match=other):
        StaticOptions.parse({one: "true", other: "true"})
    assert StaticOptions.parse({one: "true", other: "false"}) != StaticOptions()


def test_align_by_socket_needs_a_fitting_host() -> None:
    """align-by-socket is refused with more packages than nodes, and with single-numa-node."""
    options = StaticOptions(align_by_socket=True)
    two_packages = Machine.of(host(Shape(lowers=2, packages_in_nodes=True).cpus()))
    with pytest.raises(ConfigError, match="2"):
        options.check_against(two_packages)
    StaticOptions().check_against(two_packages, single_numa_node=True)
    with pytest.raises(ConfigError, match="single-numa-node"):
        options.check_against(Machine.of(flat(4)), single_numa_node=True)
    options.check_against(Machine.of(flat(4)))
