"""containerd's configuration as `config dump` prints it, drop-ins, and base runtime specs."""

from __future__ import annotations

import json

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers import containerd as wire

OURS = "/usr/libexec/ours"
HOOKS: dict[str, list[dict[str, object]]] = {
    "poststop": [{"path": OURS, "args": ["new"]}],
    "createRuntime": [{"path": OURS}],
}

DUMP = """
version = {version}
imports = ["/etc/containerd/config.toml"]
[plugins."{plugin}"]
  sandbox_image = "pause:1"
[plugins."{plugin}".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = ""
[plugins."{plugin}".containerd.runtimes.kata-qemu]
  runtime_type = "io.containerd.kata-qemu.v2"
  base_runtime_spec = "/etc/base.json"
[plugins."{plugin}".containerd.runtimes.third]
  runtime_type = "io.containerd.runc.v2"
  runtime_path = "/opt/kata/bin/containerd-shim-kata-v2"
"""


@pytest.mark.parametrize(
    ("version", "plugin"), list(zip((4, 2), wire.RUNTIME_PLUGINS, strict=True))
)
def test_handlers_of_a_dump(version: int, plugin: str) -> None:
    """Kata's are known by the type or the path of their shim; both generations of the plugin."""
    config = wire.parse_dump(DUMP.format(version=version, plugin=plugin))
    assert (config.version, config.plugin) == (version, plugin)
    assert [one.name for one in config.handlers.values() if one.is_kata] == ["kata-qemu", "third"]
    assert config.handlers["kata-qemu"].base_spec == "/etc/base.json"
    assert config.handlers["third"].base_spec == config.handlers["runc"].base_spec == ""


@pytest.mark.parametrize(
    "text",
    ["", "version = 2", "plugins = 3\nversion = 2", "version = 2\n[plugins.x]", "version = ",
     'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\ncontainerd = 1'],
)  # fmt: skip
def test_what_is_no_dump(text: str) -> None:
    """It is refused, not taken for a containerd without handlers."""
    with pytest.raises(ParseError):
        wire.parse_dump(text)


def test_names_that_are_no_handlers_are_left_out() -> None:
    """A file is named by its handler: a name may not lead elsewhere."""
    plugin = wire.RUNTIME_PLUGINS[1]
    text = f'version = 2\n[plugins."{plugin}".containerd.runtimes."../../x"]\nruntime_type = "a"\n'
    assert wire.parse_dump(text).handlers == {}


def test_a_drop_in_says_one_thing_per_handler() -> None:
    """The version and table of the dump, the path, and nothing that could replace a setting."""
    config = wire.parse_dump(DUMP.format(version=3, plugin=wire.RUNTIME_PLUGINS[0]))
    text = wire.drop_in(config, 3, {"kata-qemu": "/a.json", "third": "/b.json"})
    lines = [line.strip() for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == [
        "version = 3",
        '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes."kata-qemu"]',
        'base_runtime_spec = "/a.json"',
        '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes."third"]',
        'base_runtime_spec = "/b.json"',
    ]
    assert wire.base_specs(text) == {"/a.json", "/b.json"}


def test_what_a_file_names() -> None:
    """Inline tables count, comments and empty texts do not; nor imports that are no texts."""
    text = (
        'imports = ["a", 3, "/b/*.toml"]\n# base_runtime_spec = "/no"\n'
        'x = { kata = { base_runtime_spec = "/yes" } }\nbase_runtime_spec = 4\n'
        'y = { base_runtime_spec = "" }\n'
    )
    assert wire.base_specs(text) == {"/yes"}
    assert wire.parse_imports(text) == ("a", "/b/*.toml")
    assert wire.parse_imports("imports = 3") == ()


def test_hooks_are_added_behind_others() -> None:
    """Those of others stay, ours of an earlier install are replaced; all else is as it was."""
    spec = wire.parse_spec(
        json.dumps(
            {
                "ociVersion": "1.2.0",
                "process": {"cwd": "/"},
                "hooks": {
                    "poststop": [{"path": "/other"}, {"path": OURS, "args": ["old"]}],
                    "prestart": [{"path": OURS}],
                    "poststart": None,
                },
            }
        ).encode(),
        "spec",
    )
    merged = wire.with_hooks(spec, HOOKS, OURS)
    assert merged == {
        "ociVersion": "1.2.0",
        "process": {"cwd": "/"},
        "hooks": {
            "poststop": [{"path": "/other"}, {"path": OURS, "args": ["new"]}],
            "createRuntime": [{"path": OURS}],
        },
    }
    assert wire.with_hooks(merged, HOOKS, OURS) == merged


def test_without_containerds_defaults() -> None:
    """With a base spec containerd keeps these; without one it removes them itself."""
    spec = {
        "process": {"cwd": "/", "rlimits": [{"type": "RLIMIT_NOFILE"}], "apparmorProfile": "x"},
        "linux": {"seccomp": {}, "namespaces": []},
        "root": {},
    }
    assert wire.without_defaults(spec) == {
        "process": {"cwd": "/"},
        "linux": {"namespaces": []},
        "root": {},
    }


@pytest.mark.parametrize("text", ["[]", '{"hooks": 1}', '{"hooks": {"poststop": [3]}}', "{", ""])
def test_what_is_no_spec(text: str) -> None:
    """containerd's CRI plugin would not start with it, or runs what nobody saw."""
    with pytest.raises(ParseError):
        wire.parse_spec(text.encode(), "spec")


def test_whether_a_spec_runs_a_program() -> None:
    """A spec that cannot be read may run what it mentions."""
    assert wire.runs_program(json.dumps({"hooks": HOOKS}).encode(), OURS)
    assert not wire.runs_program(json.dumps({"root": {"path": OURS}}).encode(), OURS)
    assert wire.runs_program(f"{{{OURS}".encode(), OURS)
    assert not wire.runs_program(b"", OURS)
