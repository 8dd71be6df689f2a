"""The section alloc: who decides, rules for annotations, and what policies are given."""

from __future__ import annotations

import pytest

from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.config.table import as_yaml
from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ConfigError
from kata_pin.base.settings import AllowRule, AssignRule, Eligibility
from kata_pin.base.values import CpuClass
from kata_pin.service.configuration import from_text


def read(body: str) -> Config:
    """Read a file with this section."""
    return from_text(f"version: 1\nalloc: {{{body}}}\n", "k.yaml")


def test_off_by_default() -> None:
    """Without the section nothing is decided."""
    assert not Config().alloc.on
    assert Config().alloc == Alloc()


def test_settings_of_policies() -> None:
    """What the file says is what a policy is given."""
    config = read(
        "policy: topology, cpus: 0-15, reserved: 0-1, strict_reserved: true, housekeeping: 2, "
        "shared_minimum: 4, eligibility: relaxed, options: {full-pcpus-only: 'true'}, "
        "allow: [{namespace: shop}], fail: strict, pin_memory: true, max_sharers: 3, "
        "default_vcpus: 2, overhead_millis: 500, own_cpus: 1"
    )
    assert config.alloc.on
    found = config.alloc
    assert (found.cpus, found.reserved, found.housekeeping) == (
        *(CpuSet(range(16)), CpuSet([0, 1])),
        CpuSet([2]),
    )
    assert (found.strict_reserved, found.shared_minimum, found.fail) == (True, 4, Fail.STRICT)
    assert (found.eligibility, found.options) == (
        Eligibility.RELAXED,
        {"full-pcpus-only": "true"},
    )
    assert (found.pin_memory, found.max_sharers) == (True, 3)
    assert (found.default_vcpus, found.overhead_millis, found.own_cpus) == (2, 500, 1)


def test_rules_for_annotations() -> None:
    """Namespace and handler by pattern; both classes unless the rule names them."""
    shop, kata, share = read(
        "allow: [{namespace: shop}, {handler: 'kata*'}, {namespace: 'a?', classes: [share]}]"
    ).alloc.allow
    assert shop == AllowRule("shop", "*")
    assert kata.allows("x", "kata-qemu", CpuClass.EXCLUSIVE)
    assert not kata.allows("x", "runc", CpuClass.SHARE)
    assert share.allows("ab", "", CpuClass.SHARE)
    assert not share.allows("ab", "", CpuClass.EXCLUSIVE)


def test_rules_for_classes() -> None:
    """A rule that names RDT or block-I/O classes allows no class of CPUs unless it says so."""
    config = read(
        "allow: [{namespace: shop, rdt: [gold]}, {handler: runc, classes: [share], blockio: [a]}],"
        "assign: [{namespace: 'b*', rdt: gold, blockio: fast}, {handler: runc, rdt: x.1-y_z}],"
        "mount_sources: [/run/hints]"
    )
    shop, runc = config.alloc.allow
    assert shop == AllowRule("shop", "*", frozenset(), frozenset({"gold"}))
    assert runc.blockio == {"a"}
    assert not runc.allows("shop", "runc", CpuClass.EXCLUSIVE)
    bank, other = config.alloc.assign
    assert bank == AssignRule("b*", "*", "gold", "fast")
    assert other == AssignRule("*", "runc", "x.1-y_z", "")
    assert config.alloc.mount_sources == ("/run/hints",)


@pytest.mark.parametrize("path", ["/run/kata-pin", "/srv/x.d", "/process", '""'])
def test_where_the_placement_file_may_be(path: str) -> None:
    """A folder that can be mounted over; empty: no file."""
    assert read(f"placement_file: {path}").alloc.placement_file == path.strip('"')


@pytest.mark.parametrize(
    "path", ["/", "x", "/proc", "/sys/fs", "/dev", "/a/../proc", "/a//b", "/a/"]
)
def test_where_it_may_not_be(path: str) -> None:
    """Not over the root or what the kernel shows."""
    with pytest.raises(ConfigError, match="an absolute path outside"):
        read(f"placement_file: {path}")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("shop", "expected a mapping"),
        ("{namespace: shop}", "expected rdt, blockio or both"),
        ("{rdt: gold}", "expected a namespace, a handler or both"),
        ("{namespace: shop, rdt: ../gold}", "expected a class"),
        ("{namespace: shop, rdt: ''}", "expected a class"),
        ("{namespace: shop, rdt: [gold]}", "not a list"),
        ("{namespace: shop, classes: [share], rdt: a}", "expected namespace, handler, rdt or"),
    ],
)
def test_wrong_assignments(rule: str, said: str) -> None:
    """A class is a name, and a rule assigns at least one."""
    with pytest.raises(ConfigError, match=said) as caught:
        read(f"assign: [{rule}]")
    assert caught.value.key == "alloc.assign"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("shop", "expected a mapping"),
        ("{namespace: shop, rdt: [a/b]}", "expected a class"),
        ("{}", "expected a mapping|expected a namespace, a handler"),
        ("{classes: [share]}", "expected a namespace, a handler or both"),
        ("{namespace: shop, pod: web}", "'pod'"),
        ("{namespace: shop, classes: [none]}", "expected share, exclusive or both"),
        ("{namespace: shop, classes: []}", "expected share, exclusive or both"),
        ("{namespace: shop, classes: [all]}", "expected one of none, share, exclusive"),
        ('{namespace: "a\\tb"}', "expected a name"),
        ("{namespace: [a]}", "not a list"),
    ],
)
def test_wrong_rules(rule: str, said: str) -> None:
    """A rule that cannot be meant is refused with its key."""
    with pytest.raises(ConfigError, match=said) as caught:
        read(f"allow: [{rule}]")
    assert caught.value.key == "alloc.allow"


def test_rules_are_written_back() -> None:
    """`config show` prints what reads back as the same rules."""
    config = read("policy: annotation, allow: [{namespace: shop, classes: [share]}]")
    assert from_text(as_yaml(config)).alloc == config.alloc


@pytest.mark.parametrize(
    "text", ["", "https://node-7:10250/pods", "http://127.0.0.1:10255/pods", "http://[::1]:1/pods",
     "unix:/var/lib/kubelet/pods-api/pods-api.sock"],
)  # fmt: skip
def test_addresses(text: str) -> None:
    """https anywhere, http on this host, or nothing."""
    assert read(f"pods_url: '{text}'").alloc.pods_url == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://node-7:10255/pods", "this host only"),
        ("ftp://localhost/pods", "expected https"),
        ("localhost:10255", "expected https"),
        ("https://user:secret@node/pods", "expected https"),
        ("https://node:99999/pods", "not an address"),
        ("https://node/a b", "not an address"),
        ("unix:pods-api.sock", "path"),
    ],
)
def test_wrong_addresses(text: str, said: str) -> None:
    """A credential leaves this host under TLS alone, and stands in a file."""
    with pytest.raises(ConfigError, match=said):
        read(f"pods_url: '{text}'")
