"""The text of a configuration: YAML's traps, unknown keys, contradictions."""

import pytest

from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ConfigError
from kata_pin.base.settings import ExclusiveMode, Overhead, OverheadKind, VcpuMode
from kata_pin.base.values import Mode, ThreadRole
from kata_pin.placement.pairing import setting_for
from kata_pin.service.configuration import MAX_ERRORS, from_text
from kata_pin.service.configuration import read as read_all


def read(body: str) -> Config:
    """Read settings below the version line."""
    return from_text(f"version: 1\n{body}\n", "k.yaml")


def refused(body: str) -> ConfigError:
    """Return the error that settings below the version line give."""
    with pytest.raises(ConfigError) as caught:
        read(body)
    return caught.value


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "version: 1\n"])
def test_nothing_set_means_defaults(text: str) -> None:
    """An empty document, comments, or the version alone are the defaults."""
    assert from_text(text) == Config()


def test_every_kind_of_value() -> None:
    """A text with each kind of value gives the typed tree."""
    config = read(
        """\
mode: observe
vcpus: float
overhead: reserve:2
overhead_roles: {iothread: 0-3, shim: housekeeping}
housekeeping: 0,8
exclusive_handlers:
  kata-rt: always
container_leaves: kata
hypervisors:
- /srv//qemu/
paths: {vc: /tmp/vc}
audit:
  affinity_s: 0.5
hook: {strict: true, pin_ms: 0}
qmp:
"""
    )
    assert config.mode is Mode.OBSERVE
    assert not config.acts
    assert config.paths.vc == "/tmp/vc"
    assert config.audit.affinity_s == 0.5
    assert config.hook.strict
    assert config.hook.pin_ms == 0
    assert config.hypervisors == ("/srv/qemu",)
    placement = config.placement
    assert placement.vcpus is VcpuMode.FLOAT
    assert placement.overhead == Overhead(OverheadKind.RESERVE, reserve=2)
    assert placement.overhead_roles == {
        ThreadRole.IOTHREAD: Overhead(OverheadKind.CPUS, cpus=CpuSet.parse("0-3")),
        ThreadRole.SHIM: Overhead(OverheadKind.HOUSEKEEPING),
    }
    assert placement.housekeeping == CpuSet([0, 8])
    assert placement.exclusive_handlers == {"kata-rt": ExclusiveMode.ALWAYS}
    assert placement.stopped_counts


def test_shim_is_left_alone_by_default() -> None:
    """The shim is touched only when it is named (D11)."""
    placement = read("overhead_roles: {iothread: sandbox}").placement
    assert setting_for(placement, ThreadRole.SHIM).kind is OverheadKind.LEAVE
    assert setting_for(placement, ThreadRole.IOTHREAD).kind is OverheadKind.SANDBOX


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", [0]), ("010", [10]), ("1", [1]), ("08", [8]), ('"2-3"', [2, 3]), ("1_0", None)],
)
def test_numbers_stay_as_written(text: str, cpus: list[int] | None) -> None:
    """A cpu list is text: no octal, no integer guess, no underscores."""
    if cpus is None:
        assert refused(f"housekeeping: {text}").key == "housekeeping"
    else:
        assert read(f"housekeeping: {text}").housekeeping == CpuSet(cpus)


@pytest.mark.parametrize(
    ("body", "key", "words"),
    [
        pytest.param("housekeeping: 1:30", "housekeeping", "'1:30'", id="sexagesimal"),
        pytest.param("housekeeping: 0-99999999999", "housekeeping", "range", id="huge range"),
        pytest.param(
            "resctrl: {classes: {a: 'L3:0=xyz'}}", "resctrl.classes", "schemata", id="schemata"
        ),
        pytest.param(
            "resctrl: {enabled: true, rules: [{class: a}]}",
            "resctrl.rules",
            "no class 'a'",
            id="class",
        ),
        pytest.param(
            "resctrl: {classes: {a: 'L3:0=f'}, rules: [{class: a}]}",
            "resctrl.rules",
            "resctrl.enabled is false",
            id="resctrl off",
        ),
        pytest.param(
            "resctrl: {enabled: true, rules: [{klass: a}]}", "resctrl.rules", "'klass'", id="rule"
        ),
        pytest.param("rt: {vcpus: fifo:50}", "rt.vcpus", "from 1 to 49", id="priority"),
        pytest.param("mode: on", "mode", "one of act, observe: 'on'", id="on is no boolean"),
        pytest.param("qmp: {enabled: on}", "qmp.enabled", "true or false: 'on'", id="on"),
        pytest.param("qmp: {enabled: yes}", "qmp.enabled", "true or false: 'yes'", id="yes"),
        pytest.param("nri: {enabled: true}", "nri.enabled", "one of auto, yes, no", id="nri"),
        pytest.param("nri: {index: 5}", "nri.index", "two digits: '5'", id="index"),
        pytest.param("nri: {index: '٣٣'}", "nri.index", "two digits", id="index of other digits"),
        pytest.param("hook: {pin_ms: 0x10}", "hook.pin_ms", "whole number", id="hex"),
        pytest.param("hook: {pin_ms: 010}", "hook.pin_ms", "whole number: '010'", id="octal"),
        pytest.param("hook: {pin_ms: 1e3}", "hook.pin_ms", "whole number", id="exponent"),
        pytest.param("hook: {pin_ms: -1}", "hook.pin_ms", "whole number", id="negative"),
        pytest.param("hook: {pin_ms: 99999}", "hook.pin_ms", "0 to 10000", id="too large"),
        pytest.param("hook: {pin_ms: '٣'}", "hook.pin_ms", "whole number", id="other digits"),
        pytest.param("audit: {deep_s: .inf}", "audit.deep_s", "a number", id="infinity"),
        pytest.param("audit: {deep_s: nan}", "audit.deep_s", "a number", id="nan"),
        pytest.param("audit: {affinity_s: 0}", "audit.affinity_s", "0.1 to 3600", id="no pause"),
        pytest.param("mode:", "mode", "found nothing", id="no value"),
        pytest.param("mode: [act]", "mode", "not a list", id="list for a word"),
        pytest.param("mode: {a: b}", "mode", "not a mapping", id="mapping for a word"),
        pytest.param("hypervisors: /usr/bin/x", "hypervisors", "a list", id="word for a list"),
        pytest.param("hypervisors: [qemu]", "hypervisors", "absolute", id="relative path"),
        pytest.param('runtime_dir: "/a\\nb"', "runtime_dir", "not a path", id="newline in path"),
        pytest.param("group: a/b", "group", "a name", id="slash in a name"),
        pytest.param("overhead: reserve:0", "overhead", "1 to 64", id="reserve nothing"),
        pytest.param("overhead: reserve", "overhead", "reserve:k", id="reserve without k"),
        pytest.param("overhead: auto:1", "overhead", "expected auto", id="k for auto"),
        pytest.param("overhead: cpus", "overhead", "expected auto", id="kind that is no word"),
        pytest.param("overhead_roles: {gpu: auto}", "overhead_roles", "'gpu'", id="no such role"),
        pytest.param("overhead_roles: {shim: x}", "overhead_roles", "shim: expected", id="entry"),
        pytest.param("audit: 10", "audit", "a section of settings", id="value for a section"),
        pytest.param("audit: [a]", "audit", "a section of settings", id="list for a section"),
    ],
)
def test_bad_values_name_file_and_key(body: str, key: str, words: str) -> None:
    """A value that its kind refuses gives file, key path and what was expected."""
    error = refused(body)
    assert error.key == key
    assert error.file == "k.yaml"
    assert error.exit_code == 78
    assert str(error).startswith(f"k.yaml: {key}: ")
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "key", "hint"),
    [
        ("vcpu: pair", "vcpu", "did you mean vcpus?"),
        ("audit: {affinty_s: 1}", "audit.affinty_s", "did you mean audit.affinity_s?"),
        ("pin_ms: 3", "pin_ms", "did you mean hook.pin_ms?"),
        ("audits: {deep_s: 1}", "audits", "did you mean audit?"),
        ("colour: red", "colour", "kata-pin config sample lists every setting"),
        ('"[red]x": 1', "[red]x", "kata-pin config sample lists every setting"),
    ],
)
def test_unknown_keys_name_the_nearest(body: str, key: str, hint: str) -> None:
    """A key that does not exist is refused with the nearest one that does."""
    error = refused(body)
    assert (error.key, error.hint) == (key, hint)
    assert "no such setting" in error.message


def test_alias_bomb_is_cheap() -> None:
    """Nine levels of nine aliases are refused at the first anchor, not expanded."""
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 9))
    with pytest.raises(ConfigError, match="anchors and aliases"):
        from_text("version: 1\nl0: &l0 [a]\n" + levels)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("overhead: housekeeping", "overhead"),
        ("overhead_roles: {vhost: housekeeping}", "overhead_roles.vhost"),
        ("audit: {affinity_s: 61}", "audit.deep_s"),
        ("qmp: {session_ms: 20}", "qmp.session_ms"),
    ],
)
def test_contradictions_name_one_key(body: str, key: str) -> None:
    """Settings that contradict each other are refused, the message says the key once."""
    error = refused(body)
    assert error.key == key
    assert error.message.count(key) == 1


def test_long_lists_and_mappings_are_refused() -> None:
    """The number of entries is bounded."""
    assert "more than 256" in refused(f"hypervisors: [{', '.join(['/x'] * 257)}]").message
    many = ", ".join(f"h{n}: auto" for n in range(257))
    assert "more than 256" in refused(f"exclusive_handlers: {{{many}}}").message


def test_a_file_of_errors_is_read_within_bounds() -> None:
    """Thousands of unknown keys are no work for a daemon that reloads."""
    reading = read_all("version: 1\n" + "".join(f"k{n}: 1\n" for n in range(7000)))
    assert len(reading.errors) == MAX_ERRORS
    assert reading.config == Config()
