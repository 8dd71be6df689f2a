"""`config check`: every error of a file at once, and what this node does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commandline import run

WRONG = """\
version: 1
mode: acct
modus: act
qmp: {greeting_ms: 90, session_ms: 50}
audit:
  affinity_s: 5
  deep_s: soon
group: no-such-group
housekeeping: 0,8190
hypervisors:
  - /usr/bin/env
  - /nonexistent/qemu
alloc:
  policy: static
  reserved: 8000-8001
  options:
    full-pcpus-only: "true"
    full-pcpus: "yes"
paths: {kata_configs: [/nonexistent], kubelet_state: /run/nothing/yet}
"""


def test_all_errors_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with file, line and key, in the order of the lines; exit status 78."""
    file = tmp_path / "k.yaml"
    file.write_text(WRONG)
    assert run(["config", "check", str(file)]) == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("  hint: ")]
    places = [line.removeprefix(f"kata-pin: {file}: line ").split(": ", 2) for line in lines]
    assert [(int(line), key) for line, key, _ in places] == [
        (2, "mode"),
        (3, "modus"),
        (4, "qmp.session_ms"),
        (7, "audit.deep_s"),
        (8, "group"),
        (9, "housekeeping"),
        (12, "hypervisors.1"),
        (15, "alloc.reserved"),
        (18, "alloc.options.full-pcpus"),
        (19, "paths.kata_configs.0"),
    ]
    said = {key: text for _, key, text in places}
    assert said["mode"] == "expected one of act, observe: 'acct'"
    assert said["group"] == "no such group: no-such-group"
    assert said["housekeeping"].startswith("the node has no CPU 8190; it has 0")
    assert said["hypervisors.1"] == "not an executable file: /nonexistent/qemu"
    assert (
        "unknown option of the static policy; options are full-pcpus-only, strict"
        in (said["alloc.options.full-pcpus"])
    )
    assert said["paths.kata_configs.0"] == "/nonexistent: No such file or directory"


def test_all_errors_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, for programs."""
    file = tmp_path / "k.yaml"
    file.write_text(WRONG)
    assert run(["config", "check", "--json", str(file)]) == 78
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["file"], len(document["problems"])) == (False, str(file), 10)
    first = document["problems"][0]
    assert (first["line"], first["key"]) == (2, "mode")


def test_without_the_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file for another machine is only read."""
    file = tmp_path / "k.yaml"
    file.write_text("version: 1\nhousekeeping: 8190\ngroup: no-such-group\n")
    assert run(["config", "check", str(file)]) == 78
    assert run(["config", "check", "--file-only", str(file)]) == 0
    assert f"{file}: ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param(
            "housekeeping: 8190\nalloc: {policy: statik, options: {my: own}}",
            [(2, "housekeeping", "no CPU"), (3, "alloc.policy", "unknown policy 'statik'; known")],
            id="policy",
        ),
        pytest.param(
            "alloc:\n  policy: topology\n  options: {full-pcpus-only: 'true'}",
            [(4, "alloc.options.full-pcpus-only", "the policy topology has no options")],
            id="options of another policy",
        ),
        pytest.param(
            "alloc:\n  policy: static\n  options:\n    full-pcpus-only: 'true'\n"
            "    distribute-cpus-across-cores: 'true'",
            [(5, "alloc.options.full-pcpus-only", "cannot be used together with")],
            id="options that exclude each other",
        ),
        pytest.param(
            "overhead: 8190", [(2, "overhead", "the node has no CPU 8190")], id="overhead"
        ),
        pytest.param(
            "overhead_roles: {shim: 8190}",
            [(2, "overhead_roles.shim", "the node has no CPU 8190")],
            id="a role's overhead",
        ),
        pytest.param(
            "alloc: {policy: static, cpus: 8190, housekeeping: 8191}",
            [(2, "alloc.cpus", "no CPU 8190"), (2, "alloc.housekeeping", "no CPU 8191")],
            id="CPUs of the allocator",
        ),
        pytest.param(
            "alloc: {pods_token: /nonexistent/token, pods_ca: /usr}",
            [
                (2, "alloc.pods_ca", "not a file: /usr"),
                (2, "alloc.pods_token", "/nonexistent/token: No such file"),
            ],
            id="files",
        ),
        pytest.param("audit.deep_s: 70", [(2, "audit.deep_s", "not a key")], id="a key with a dot"),
        pytest.param(
            "hypervisors: [/run/qemu-not-yet]", [(2, "hypervisors.0", "not an exec")], id="vmm"
        ),
        pytest.param("hypervisors: ['/usr/bin/env*']", [], id="a pattern"),
        pytest.param(
            "shims: ['/usr/bin/no-such-shim*']", [(2, "shims.0", "not an exec")], id="no match"
        ),
        pytest.param("paths: {bundle_roots: [/run/not-yet]}", [], id="made at run time"),
        pytest.param("group: root\nhypervisors: [/usr/bin/env]\nhousekeeping: 0", [], id="good"),
        pytest.param("alloc: {policy: static, reserved: 0}", [], id="good policy"),
    ],
)
def test_what_the_node_does_not_have(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: str,
    found: list[tuple[int, str, str]],
) -> None:
    """Each is an error of its setting; what is there is none."""
    file = tmp_path / "k.yaml"
    file.write_text(f"version: 1\n{body}\n")
    assert run(["config", "check", "--json", str(file)]) == (78 if found else 0)
    problems = json.loads(capsys.readouterr().out)["problems"]
    errors = sorted((one["line"], one["key"], one["error"]) for one in problems)
    assert [(line, key) for line, key, _ in errors] == [(line, key) for line, key, _ in found]
    for (_, _, text), (_, _, part) in zip(errors, found, strict=True):
        assert part in text
