"""What `kata-pin install` puts on a node, and what `uninstall` leaves."""

from __future__ import annotations

import ast
import asyncio
import configparser
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin import hook
from kata_pin.base.config.tree import Config, Hook
from kata_pin.base.documents.answers import Applied, AppliedSandbox
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.pools import KeptCpuset
from kata_pin.base.errors import DaemonError, HostError, KataPinError, ParseError, StateError
from kata_pin.base.json_text import Fields
from kata_pin.base.values import NoteLevel
from kata_pin.cli.commands.install import (
    NO_HOOKS,
    is_before,
    kept_cpusets,
    program_file,
    release_pins,
    settings_file,
    uninstall_node,
)
from kata_pin.cli.node import changes as changes_module
from kata_pin.cli.node.changes import MANIFEST, NodeFiles
from kata_pin.cli.node.files import (
    COMPLETIONS,
    DOCUMENTS,
    HOOK_PATH,
    HOOKS_DIR,
    PROGRAM_LINK,
    UNIT,
    Choices,
    NodeFile,
    NodeLink,
    Runtime,
    node_files,
)
from kata_pin.cli.quick import COMPLETE
from kata_pin.linux.process import open_locked
from kata_pin.service.commands import ControlServer
from kata_pin.service.configuration import DEFAULT_FILE, from_text
from kata_pin.service.protocol import encode
from tests.support.commandline import run
from tests.support.hooks import runtime_directory

Capture = pytest.CaptureFixture[str]

ALL = frozenset(Runtime)
NOTHING = Applied(kind="unpin", sandboxes=())
PROGRAM = "/opt/kata-pin/bin/kata-pin"


def choose(*runtimes: Runtime, config: str = "version: 1\n", prestart: bool = False) -> Choices:
    return Choices(
        program=PROGRAM,
        runtimes=frozenset(runtimes),
        config=from_text(config),
        prestart=prestart,
    )


def plain_files(choices: Choices) -> list[NodeFile]:
    """Return what is installed but for the link."""
    return [file for file in node_files(choices) if isinstance(file, NodeFile)]


def contents(choices: Choices) -> dict[str, bytes]:
    return {file.path: file.content for file in plain_files(choices)}


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content; of a link where it leads."""
    return {
        f"/{p.relative_to(root)}": os.readlink(p).encode() if p.is_symlink() else p.read_bytes()
        for p in root.rglob("*")
        if p.is_symlink() or p.is_file()
    }


def test_hook_program_is_the_hook() -> None:
    """The installed hook holds hook.py unchanged, is executable, and the same each time."""
    choices = Choices(program="/usr/bin/kata-pin", python="/opt/python/bin/python3.12")
    [file] = [f for f in plain_files(choices) if f.path == HOOK_PATH]
    assert file.content.startswith(b"#!/opt/python/bin/python3.12 -IS\n")
    [source] = [
        ast.literal_eval(node.value)
        for node in ast.parse(file.content).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE"
    ]
    assert source == Path(hook.__file__).read_text()
    assert file.mode == 0o755
    assert file in node_files(choices)


@pytest.mark.parametrize("python", ["python3", "/a b/python3", "/" + "x" * 300, ""])
def test_interpreter_that_a_first_line_can_not_hold(python: str) -> None:
    """An interpreter that the kernel would not find is refused."""
    with pytest.raises(KataPinError, match="cannot be the interpreter"):
        node_files(Choices(program="/usr/bin/kata-pin", python=python))


@pytest.mark.parametrize("same", [True, False])
def test_installed_hook_runs(tmp_path: Path, *, same: bool) -> None:
    """The installed file runs by its own first line, also under another version of Python."""
    choices = Choices(program=PROGRAM, python=os.path.realpath(sys.executable))
    NodeFiles(str(tmp_path)).install(node_files(choices))
    program = Path(f"{tmp_path}{HOOK_PATH}")
    text, code = program.read_text(), re.compile(r'(?<=^CODE = ")\w+', re.MULTILINE)
    if same:  # its source is not needed
        assert MAGIC_NUMBER.hex() in text
        program.write_text(text.replace("def hand_over", "def gone"))
    else:  # its code is not
        text = text.replace(MAGIC_NUMBER.hex(), "00000000")
        program.write_text(code.sub("00", text))
    done = subprocess.run(
        [program, "poststop", f"--runtime-dir={tmp_path}/absent"],
        input=b"{}", env={}, capture_output=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith(b"kata-pin-hook: neither recorded")


def test_hooks_dir_for_crio() -> None:
    """CRI-O gets one file a phase, for every container, as oci-hooks(5) describes them."""
    files = contents(choose(Runtime.CRIO))
    for phase in ("createRuntime", "poststart", "poststop"):
        assert json.loads(files[f"{HOOKS_DIR}/90-kata-pin-{phase}.json"]) == {
            "version": "1.0.0",
            "hook": {"path": HOOK_PATH, "args": ["kata-pin-hook", phase], "timeout": 10},
            "when": {"always": True},
            "stages": [phase],
        }
    assert sum(path.startswith(HOOKS_DIR) for path in files) == 3


def test_hooks_dir_for_podman() -> None:
    """podman's hooks are by annotation; beside CRI-O's, which podman reads too, there are none."""
    name = f"{HOOKS_DIR}/90-kata-pin-createRuntime.json"
    alone = json.loads(contents(choose(Runtime.PODMAN))[name])
    [(key, value)] = alone["when"]["annotations"].items()
    assert re.search(key, "io.kata-pin.enable")
    assert re.search(value, "true")
    assert contents(choose(Runtime.PODMAN, Runtime.CRIO)) == contents(choose(Runtime.CRIO))


def test_containerd_fragment() -> None:
    """The base runtime spec's hooks are for Kata only and so hold createContainer too."""
    hooks = json.loads(
        contents(choose(Runtime.CONTAINERD, prestart=True))["/etc/kata-pin/containerd-hooks.json"]
    )["hooks"]
    assert set(hooks) == set(hook.PHASES)
    for phase, [entry] in hooks.items():
        assert entry["path"] == HOOK_PATH
        assert entry["args"] == ["kata-pin-hook", phase]


def test_settings_become_arguments() -> None:
    """Settings that differ from the hook's own defaults are in its arguments, no others are."""
    changed = "version: 1\nruntime_dir: /run/other\nhook: {record_ms: 90, pin_ms: 80, strict: true}"
    files = contents(choose(Runtime.PODMAN, config=changed))
    arguments = json.loads(files[f"{HOOKS_DIR}/90-kata-pin-poststop.json"])["hook"]["args"]
    assert arguments[2:] == [
        "--runtime-dir=/run/other",
        "--record-ms=90",
        "--pin-ms=80",
        "--strict",
    ]
    options = hook.Arguments(arguments[1:])
    assert (options.runtime_dir, options.record_s, options.pin_s) == ("/run/other", 0.09, 0.08)


def test_strict_is_refused_for_crio() -> None:
    """Strict hooks for every container of a node would fail those that no VMM runs."""
    with pytest.raises(KataPinError, match="does not use Kata"):
        node_files(choose(Runtime.CRIO, config="version: 1\nhook: {strict: true}\n"))


def test_defaults_are_the_hooks() -> None:
    """The configuration's defaults are those that the hook has without arguments."""
    options = hook.Arguments(["poststop"])
    assert options.runtime_dir == Config().runtime_dir
    assert options.record_s * 1000 == Hook().record_ms
    assert options.pin_s * 1000 == Hook().pin_ms


def unit_of(choices: Choices) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    text = contents(choices)[UNIT].decode()
    taken_away = "SystemCallFilter=~"  # the second line of this list; nothing else is there twice
    given_back = "SystemCallFilter=capset"  # the third
    assert text.count(taken_away) == text.count(given_back) == 1
    text = text.replace(given_back, "AllowedCalls=capset")
    parser.read_string(text.replace(taken_away, "RefusedCalls="))
    return parser["Service"]


def test_unit_has_the_rights_it_needs() -> None:
    """The service has what its broker needs, and none of the limits that would blind it."""
    service = unit_of(choose())
    assert set(service["CapabilityBoundingSet"].split()) == {
        "CAP_SYS_NICE", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_DAC_OVERRIDE",
        "CAP_PERFMON",
    }  # fmt: skip
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"]
    assert service["User"] == "kata-pin"
    assert not {"PrivateNetwork", "PrivateUsers", "PrivatePIDs", "ProtectProc"} & set(service)
    families = set(service["RestrictAddressFamilies"].split())
    assert families == {"AF_UNIX", "AF_NETLINK", "AF_VSOCK"}
    assert service["Type"] == "notify"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["RuntimeDirectory"] == "kata-pin"
    assert service["ExecStart"] == f"{PROGRAM} run"
    assert service["ExecReload"] == f"!{PROGRAM} reload"


@pytest.mark.parametrize(
    ("release", "old"),
    [("6.1.0-37-amd64", True), ("6.5.13", True), ("6.6.0", False), ("6.18.44", False), ("x", True)],
)
def test_an_old_kernel_takes_one_right_more(release: str, old: bool) -> None:
    """The process connector before Linux 6.6: only there the service has CAP_NET_ADMIN."""
    assert is_before(release, (6, 6)) is old
    path = "/usr/lib/systemd/system/kata-pin.service.d/before-linux-6.6.conf"
    found = contents(replace(choose(), old_kernel=old))
    assert (path in found) is old
    if old:
        assert b"AmbientCapabilities=CAP_NET_ADMIN\n" in found[path]


@pytest.mark.parametrize("enabled", [True, False])
def test_resctrl_takes_a_broker_that_is_root(*, enabled: bool) -> None:
    """Only with the setting: resctrl takes threads from root only, and must be writable."""
    path = "/usr/lib/systemd/system/kata-pin.service.d/resctrl.conf"
    word = "true" if enabled else "false"
    found = contents(choose(config=f"version: 1\nresctrl: {{enabled: {word}}}\n"))
    assert (path in found) is enabled
    if enabled:
        assert b"User=root\n" in found[path]
        assert b"ReadWritePaths=-/sys/fs/resctrl\n" in found[path]


def test_real_time_vcpus_take_one_right_more() -> None:
    """RestrictRealtime is lifted only with the setting."""
    path = "/usr/lib/systemd/system/kata-pin.service.d/realtime.conf"
    assert path not in contents(choose())
    assert (
        b"RestrictRealtime=no\n"
        in contents(choose(config='version: 1\nrt: {vcpus: "fifo:1"}\n'))[path]
    )


@pytest.mark.parametrize(
    ("level", "wanted"), [("off", False), ("report", False), ("irq", True), ("full", True)]
)
def test_rights_for_quiet_pcpus(level: str, wanted: bool) -> None:
    """Only with a setting that writes; then everything but /proc/irq stays read-only."""
    path = "/usr/lib/systemd/system/kata-pin.service.d/quiet.conf"
    found = contents(choose(config=f"version: 1\nquiet: {level}\n"))
    assert (path in found) is wanted
    more = found.get(path.replace("quiet.conf", "quiet-full.conf"))
    assert (more is not None) is (level == "full")
    assert more is None or b"ReadWritePaths=/sys/devices\n" in more
    if wanted:
        assert b"ProtectKernelTunables=no\nReadOnlyPaths=/proc/sys /sys " in found[path]


def test_no_placeholder_is_left() -> None:
    """Every placeholder of the assets is filled in, and each setting reaches its files."""
    files = contents(
        choose(*ALL, config="version: 1\nruntime_dir: /run/other\ngroup: ops\nuser: pinner\n")
    )
    assert not [path for path, content in files.items() if re.search(rb"@[A-Z_]+@", content)]
    assert b"d /run/other/spool  0700 pinner ops -" in files["/usr/lib/tmpfiles.d/kata-pin.conf"]
    assert (
        b'u pinner - "kata-pin daemon"\nm pinner ops\n'
        in files["/usr/lib/sysusers.d/kata-pin.conf"]
    )
    assert b"g ops -" in files["/usr/lib/sysusers.d/kata-pin.conf"]
    assert b"RuntimeDirectory=other kata-pin\n" in files[UNIT]
    assert b"Group=ops\n" in files[UNIT]


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--config", {"config_file": "settings.yaml"}),
        ("--config", {"config_file": "/etc/my settings.yaml"}),
        ("--config", {"config_file": "/etc/%n.yaml"}),
        ("--program", {"program": "kata-pin"}),
    ],
)
def test_what_the_service_cannot_start_is_refused(option: str, changes: dict[str, str]) -> None:
    """systemd would look for it elsewhere, or read it otherwise."""
    with pytest.raises(KataPinError, match=f"the service cannot start .* \\(give {option} an abs"):
        node_files(replace(choose(), **changes))


def test_a_relative_configuration_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's folder is not the one that install runs in."""
    monkeypatch.chdir(tmp_path)
    assert settings_file("/", "settings.yaml") == f"{tmp_path}/settings.yaml"
    assert settings_file("/", "/etc/x.yaml") == "/etc/x.yaml"
    assert settings_file("/", None) == settings_file("/dest", None) == DEFAULT_FILE
    with pytest.raises(KataPinError, match="is not an absolute path"):
        settings_file("/dest", "settings.yaml")


def test_runtime_dir_elsewhere_is_refused() -> None:
    """A runtime directory that outlives a boot can not be installed."""
    with pytest.raises(KataPinError, match="not below /run"):
        node_files(choose(config="version: 1\nruntime_dir: /var/lib/kata-pin\n"))


def test_sample_settings_are_the_defaults() -> None:
    """The installed settings file can be read and changes nothing."""
    [sample] = [f for f in plain_files(choose()) if f.settings]
    assert from_text(sample.content.decode()) == Config()


def test_the_man_page_and_the_documents_of_json_are_installed() -> None:
    """Where man(1) and people look, as they are in docs/."""
    files = contents(choose())
    docs = Path(__file__).parents[4] / "docs"
    assert files["/usr/share/man/man8/kata-pin.8"] == (docs / "kata-pin.8").read_bytes()
    assert files[f"{DOCUMENTS}/json.md"] == (docs / "json.md").read_bytes()
    schemas = {f"{DOCUMENTS}/schema/{one.name}" for one in (docs / "schema").iterdir()}
    assert schemas <= set(files)


def test_the_built_package_has_what_is_installed(tmp_path: Path) -> None:
    """The links to hooks/ and docs/ become files of the wheel."""
    root = Path(__file__).parents[4]
    copy = tmp_path / "source"
    shutil.copytree(
        root, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "*.egg-info")
    )
    subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build", "-b", "out"],
        cwd=copy, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    built = copy / "out" / "lib" / "kata_pin" / "cli"
    for name in ("assets/systemd/kata-pin.service", "documents/kata-pin.8", "documents/json.md"):
        assert (built / name).is_file()
    assert len(list((built / "documents/schema").iterdir())) == len(
        list((root / "docs/schema").iterdir())
    )
    assert not (built / "documents/design.md").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_where_shells_look(shell: str, capsys: Capture) -> None:
    """The same script that `completion` prints; it asks by the variable that main() reads."""
    found = contents(choose())[COMPLETIONS[shell]].decode()
    assert run(["completion", shell]) == 0
    assert found == capsys.readouterr().out
    assert f"{COMPLETE}={shell}_complete" in found


def test_completion_works_in_a_real_shell(tmp_path: Path) -> None:
    """bash, with the installed script and the link in its PATH, completes a command."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    program = Path(sys.executable).with_name("kata-pin")
    NodeFiles(str(tmp_path)).install(node_files(Choices(program=str(program))))
    code = (
        f"PATH={tmp_path}/usr/bin:$PATH; . {tmp_path}{COMPLETIONS['bash']}; "
        "COMP_WORDS=(kata-pin expl); COMP_CWORD=1; _kata_pin_completion kata-pin; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "explain\n"


def test_the_program_is_linked_into_the_path(tmp_path: Path) -> None:
    """The link is made, repaired after an upgrade to another place, and goes with the rest."""
    node, link = NodeFiles(str(tmp_path)), tmp_path / PROGRAM_LINK[1:]
    node.install(node_files(choose()))
    assert os.readlink(link) == PROGRAM
    assert {change.verb for change in node.install(node_files(choose()))} == {"unchanged"}
    moved = [change.path for change in node.install([NodeLink(PROGRAM_LINK, "/opt/new")])]
    assert PROGRAM_LINK in moved
    assert os.readlink(link) == "/opt/new"
    assert [change.verb for change in node.uninstall()] == ["removed"]
    assert not link.is_symlink()


@pytest.mark.parametrize("own", ["file", "link"])
def test_a_program_of_somebody_else_is_kept(tmp_path: Path, own: str) -> None:
    """A package's program, or a link that leads elsewhere, is neither replaced nor removed."""
    link = tmp_path / PROGRAM_LINK[1:]
    link.parent.mkdir(parents=True)
    if own == "file":
        link.write_text("a package's")
    else:
        link.symlink_to("/elsewhere")
    node = NodeFiles(str(tmp_path))
    (kept,) = (one for one in node.install(node_files(choose())) if one.verb == "kept")
    assert kept.path == PROGRAM_LINK
    node.uninstall()
    assert list(tree(tmp_path)) == [PROGRAM_LINK]


def test_no_link_to_itself() -> None:
    """A program that is already there needs none."""
    installed = node_files(Choices(program=PROGRAM_LINK))
    assert not [file for file in installed if isinstance(file, NodeLink)]


def test_what_is_written_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest first; a file's content before its name, and the name before the next file."""
    done: list[str] = []
    rename = os.rename

    def fsync(descriptor: int) -> None:
        done.append(f"sync {os.path.relpath(os.readlink(f'/proc/self/fd/{descriptor}'), tmp_path)}")
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            assert os.fstat(descriptor).st_size, "still in a buffer"

    def renamed(source: str, target: str) -> None:
        done.append(f"rename {os.path.relpath(target, tmp_path)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    NodeFiles(str(tmp_path)).install([NodeFile("/a/b", b"text"), NodeLink("/c/d", "/a/b")])
    manifest = MANIFEST[1:]
    assert done == [
        *(f"sync {manifest}.new", f"rename {manifest}", f"sync {os.path.dirname(manifest)}"),
        *("sync a/b.new", "rename a/b", "sync a"),
        *("rename c/d", "sync c"),
    ]


def test_install_is_idempotent(tmp_path: Path) -> None:
    """A second install changes nothing, and a fresh one writes everything and no more."""
    files = node_files(choose(*ALL))
    node = NodeFiles(str(tmp_path))
    assert {change.verb for change in node.install(files)} == {"wrote"}
    before = tree(tmp_path)
    assert {change.verb for change in node.install(files)} == {"unchanged"}
    assert tree(tmp_path) == before
    assert set(before) == {f.path for f in files} | {MANIFEST}
    assert node.altered() == ([], [])


def test_manifest_is_for_sha256sum(tmp_path: Path) -> None:
    """sha256sum(1) can check what was installed."""
    NodeFiles(str(tmp_path)).install(node_files(choose(*ALL)))
    relative = (tmp_path / MANIFEST[1:]).read_text().replace("  /", "  ")
    check = ["sha256sum", "-c", "--quiet", "-"]
    subprocess.run(check, input=relative, text=True, cwd=tmp_path, check=True, timeout=20)


def test_uninstall_leaves_nothing(tmp_path: Path) -> None:
    """What install wrote is gone afterwards, folders of its own too; strangers' files stay."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root")
    node = NodeFiles(str(tmp_path))
    node.install(node_files(choose(*ALL)))
    assert {change.verb for change in node.uninstall()} == {"removed"}
    assert tree(tmp_path) == {"/etc/passwd": b"root"}
    assert not list(tmp_path.rglob("kata-pin*"))
    assert node.uninstall() == []


def test_changed_files_are_kept(tmp_path: Path) -> None:
    """A file that somebody changed is neither overwritten nor removed."""
    node = NodeFiles(str(tmp_path))
    node.install(node_files(choose(*ALL)))
    for path in (UNIT, "/etc/kata-pin/config.yaml"):
        (tmp_path / path[1:]).write_text("mine")
    (tmp_path / PROGRAM_LINK[1:]).unlink()
    newer = Choices(program="/opt/kata-pin", runtimes=ALL)
    missing, modified = node.altered()
    assert (missing, set(modified)) == ([PROGRAM_LINK], {UNIT, "/etc/kata-pin/config.yaml"})
    kept = {c.path for c in node.install(node_files(newer)) if c.verb == "kept"}
    assert kept == {UNIT, "/etc/kata-pin/config.yaml"}
    assert {c.path for c in node.uninstall() if c.verb == "kept"} == kept
    left = tree(tmp_path)
    left.pop(MANIFEST)
    assert left == dict.fromkeys(kept, b"mine")


def test_file_of_somebody_else_is_kept(tmp_path: Path) -> None:
    """A file that was there before the first install is not overwritten, nor later removed."""
    (tmp_path / UNIT[1:]).parent.mkdir(parents=True)
    (tmp_path / UNIT[1:]).write_text("from a package")
    node = NodeFiles(str(tmp_path))
    node.install(node_files(choose()))
    node.uninstall()
    assert tree(tmp_path) == {UNIT: b"from a package"}


def test_beside_a_package_only_the_hooks_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """What a package wrote is not recorded; its service goes on, and so do its affinities."""
    package = plain_files(Choices(program=PROGRAM_LINK))
    for file in package:
        target = tmp_path / file.path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
    before, node = tree(tmp_path), NodeFiles(str(tmp_path))
    files = plain_files(Choices(program=PROGRAM_LINK, runtimes=frozenset({Runtime.CRIO})))
    hooks = {file.path for file in files} - set(before)
    assert all(path.startswith(HOOKS_DIR) for path in hooks)
    for verb in ("wrote", "unchanged"):
        changes = {change.path: change for change in node.install(files)}
        assert {path for path, change in changes.items() if change.verb == verb} == hooks
        assert changes[HOOK_PATH].reason == changes[UNIT].reason == "not from kata-pin install"
    (tmp_path / MANIFEST[1:]).unlink()  # hooks are ours all the same: they name a program
    node.install(files)
    assert node.altered() == ([], [])
    monkeypatch.setattr("kata_pin.cli.commands.install.NodeFiles", lambda _: node)
    monkeypatch.setattr("kata_pin.cli.commands.install.release_pins", None)
    assert run(["uninstall"]) == 0
    said = capsys.readouterr().out
    assert f"affinities are kept: {UNIT} is not from kata-pin install" in said
    assert "disable" not in said
    assert tree(tmp_path) == before


def test_new_choices_replace_old_ones(tmp_path: Path) -> None:
    """Files of an earlier choice that is no longer wanted go; those of another version change."""
    node = NodeFiles(str(tmp_path))
    node.install(node_files(choose(Runtime.CRIO, prestart=True)))
    changes = node.install(node_files(choose(Runtime.PODMAN)))
    verbs = {c.path.rpartition("-")[2]: c.verb for c in changes if c.path.startswith(HOOKS_DIR)}
    assert verbs == {
        "prestart.json": "removed", "createRuntime.json": "wrote",
        "poststart.json": "wrote", "poststop.json": "wrote",
    }  # fmt: skip


def test_hook_that_containerd_names_stays(tmp_path: Path) -> None:
    """The hook stays while a base runtime spec names it: a missing hook fails containers."""
    (tmp_path / "etc/containerd").mkdir(parents=True)
    spec = tmp_path / "etc/containerd/kata.json"
    spec.write_text(json.dumps({"hooks": {"poststop": [{"path": HOOK_PATH}]}}))
    config = tmp_path / "etc/containerd/config.toml"
    config.write_text('  base_runtime_spec = "/etc/containerd/kata.json"\n')
    node = NodeFiles(str(tmp_path))
    node.install(node_files(choose(Runtime.CONTAINERD)))
    [kept] = [change for change in node.uninstall() if change.verb == "kept"]
    assert kept.path == HOOK_PATH
    assert "kata.json" in kept.reason
    spec.unlink()
    assert [change.path for change in node.uninstall()] == [HOOK_PATH]
    assert not (tmp_path / HOOK_PATH[1:]).exists()


def test_links_do_not_lead_out_of_the_root(tmp_path: Path) -> None:
    """A link below --root that points outside is not followed."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "etc").symlink_to(outside)
    with pytest.raises(KataPinError, match="out of"):
        NodeFiles(str(root)).install([NodeFile("/etc/x/y", b"")])
    assert list(outside.iterdir()) == []


def test_a_file_that_is_a_link_out_of_the_root(tmp_path: Path) -> None:
    """Neither what it names nor what a new file's name leads to is read or written."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "etc").mkdir(parents=True)
    outside.write_text("text")
    (root / "etc/file").symlink_to(outside)
    (root / "etc/other.new").symlink_to(outside)
    files = [NodeFile("/etc/file", b"text"), NodeFile("/etc/other", b"more")]
    changes = NodeFiles(str(root)).install(files)
    assert [one.verb for one in changes] == ["kept", "wrote"]
    assert outside.read_text() == "text"
    assert (root / "etc/other").read_text() == "more"
    assert not (root / "etc/other").is_symlink()


def test_folders_are_open_to_users_whatever_the_umask(tmp_path: Path) -> None:
    """Their containers run the hook, their commands read the settings."""
    before = os.umask(0o077)
    try:
        NodeFiles(str(tmp_path)).install(node_files(choose(*ALL)))
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o755}


def test_settings_are_the_administrators(tmp_path: Path) -> None:
    """A newer sample does not replace the file, although nobody has changed it."""
    node, old = NodeFiles(str(tmp_path)), NodeFile(DEFAULT_FILE, b"version: 1\n", settings=True)
    node.install([old])
    (change,) = node.install([replace(old, content=b"version: 1\nmode: observe\n")])
    assert change.verb == "kept"
    assert (tmp_path / DEFAULT_FILE.lstrip("/")).read_bytes() == old.content


def test_a_lock_that_its_holder_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opened the file just before it was removed holds a lock that no other run meets."""
    lock, opened = tmp_path / "lock", list[int]()
    monkeypatch.setattr(changes_module, "LOCK", str(lock))

    def removed_meanwhile(path: str, *others: Any) -> int:
        opened.append(open_locked(path, *others))
        if len(opened) == 1:
            os.unlink(path)
        return opened[-1]

    monkeypatch.setattr(changes_module, "open_locked", removed_meanwhile)
    with NodeFiles().locked():
        assert lock.exists()
        with pytest.raises(KataPinError, match="is running"), NodeFiles().locked():
            pass


def test_two_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused: both would change one manifest. Below another root nobody waits."""
    monkeypatch.setattr(changes_module, "LOCK", f"{tmp_path}/lock")
    with NodeFiles().locked():
        said = rf"install or uninstall is running \(process {os.getpid()}.*, since 2"
        with pytest.raises(KataPinError, match=said), NodeFiles().locked():
            pass
        with NodeFiles(str(tmp_path)).locked():
            pass
    assert list(tmp_path.iterdir()) == []
    with NodeFiles().locked():
        pass
    monkeypatch.setattr(changes_module, "LOCK", f"{tmp_path}/none/lock")
    with pytest.raises(HostError, match=r"cannot open .*lock: No such file"), NodeFiles().locked():
        pass


@pytest.mark.parametrize("line", ["garbage", f"{'0' * 64}  /etc/../../outside"])
def test_bad_manifest(tmp_path: Path, line: str) -> None:
    """A manifest that is not one stops the command instead of removing what it says."""
    manifest = tmp_path / MANIFEST[1:]
    manifest.parent.mkdir(parents=True)
    manifest.write_text(line + "\n")
    with pytest.raises(ParseError, match="sha256sum"):
        NodeFiles(str(tmp_path)).uninstall()


def test_what_a_failing_install_wrote_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the node that is read-only: the error names it, and uninstall removes the rest."""
    stop_writing(monkeypatch, OSError(errno.EROFS, "Read-only file system"))
    with pytest.raises(HostError, match=f"{tmp_path}/etc/kata-pin"):
        NodeFiles(str(tmp_path)).install(node_files(choose()))
    monkeypatch.undo()
    assert (tmp_path / HOOK_PATH[1:]).exists()
    changes, _ = uninstall_node(str(tmp_path), lambda: "")
    assert [(one.verb, one.path) for one in changes] == [("removed", HOOK_PATH)]
    assert not [one for one in tree(tmp_path) if "kata-pin" in one]


@pytest.mark.parametrize("where", ["/etc/kata-pin/", MANIFEST])
def test_what_a_killed_install_wrote_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also the file that was being written, and where there is no manifest yet."""
    # as good as a SIGKILL: nobody cleans up after it
    stop_writing(monkeypatch, SystemExit(), where)
    with pytest.raises(SystemExit):
        NodeFiles(str(tmp_path)).install(node_files(choose(*ALL)))
    monkeypatch.undo()
    uninstall_node(str(tmp_path), lambda: "")
    assert not list(tmp_path.rglob("*kata-pin*"))


def test_what_a_killed_install_wrote_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken for a package's that was written just before the power failed."""
    files = node_files(choose(*ALL))
    stop_writing(monkeypatch, SystemExit())
    with pytest.raises(SystemExit):
        NodeFiles(str(tmp_path)).install(files)
    monkeypatch.undo()
    assert (tmp_path / HOOK_PATH[1:]).exists()
    assert "kept" not in {change.verb for change in NodeFiles(str(tmp_path)).install(files)}


def test_a_read_only_usr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that are made so have another way to run kata-pin."""
    stop_writing(monkeypatch, OSError(errno.EROFS, "Read-only file system"), "/usr/libexec/")
    with pytest.raises(HostError, match=r"cannot write .*kata-pin-hook: Read-only") as caught:
        NodeFiles(str(tmp_path)).install(node_files(choose()))
    assert "docs/cluster.md" in caught.value.hint


def stop_writing(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str = "/etc/kata-pin/"
) -> None:
    """Have the first file below a folder not be put in place."""
    rename = os.rename

    def stop(source: str, target: str) -> None:
        if where in target:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", stop)


def test_what_is_kept_is_said_once(tmp_path: Path) -> None:
    """Uninstalling has two rounds, before and after the affinities."""
    NodeFiles(str(tmp_path)).install(node_files(choose(*ALL)))
    for path in (tmp_path / HOOKS_DIR[1:]).iterdir():
        path.write_text("mine")
    changes, _ = uninstall_node(str(tmp_path), lambda: "")
    assert len({one.path for one in changes}) == len(changes)


def test_uninstall_order(tmp_path: Path) -> None:
    """The pins are given back when no new container runs the hook, and before the rest goes."""
    NodeFiles(str(tmp_path)).install(node_files(choose(*ALL)))
    seen = []

    def release() -> str:
        seen.append(set(tree(tmp_path)))
        return "released"

    uninstall_node(str(tmp_path), release)
    [during] = seen
    assert not [path for path in during if path.startswith(HOOKS_DIR)]
    assert {HOOK_PATH, UNIT, "/etc/kata-pin/config.yaml", MANIFEST} < during


def test_failing_release_keeps_the_service(tmp_path: Path) -> None:
    """When the pins can not be given back, what is needed to try again stays."""
    NodeFiles(str(tmp_path)).install(node_files(choose(*ALL)))

    def fail() -> str:
        raise DaemonError("the daemon did not answer")

    with pytest.raises(DaemonError):
        uninstall_node(str(tmp_path), fail)
    assert {HOOK_PATH, UNIT, MANIFEST} < set(tree(tmp_path))
    uninstall_node(str(tmp_path), lambda: "released")
    assert tree(tmp_path) == {}


def test_release_without_a_daemon(tmp_path: Path) -> None:
    """Without a daemon the function that is given releases, with the node's settings."""
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    released: list[Config] = []

    def release_all(chosen: Config) -> Applied:
        released.append(chosen)
        return replace(NOTHING, cpusets_kept=(KeptCpuset("c", "shop/db", "app", "2-3"),))

    said = release_pins(config, release_all)
    assert "no daemon" in said
    assert said.splitlines()[1:] == [
        "these containers keep the CPUs that kata-pin gave them until their pods are recreated:",
        "  shop/db app 2-3",
    ]
    assert released == [config]


def test_what_a_release_leaves_is_named(tmp_path: Path) -> None:
    """Not all was restored: which threads of which pod keep what, and why; no word of all."""
    note = Note("kept-narrow", "5 threads keep 6-7: kata-pin did not set it", NoteLevel.WARNING)
    pods = AppliedSandbox("id", "shop/web", "released", "", 9, 1.0, (), (note,))
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    said = release_pins(config, lambda _: replace(NOTHING, sandboxes=(pods,)))
    assert said.splitlines() == [
        "restored affinities (no daemon is running), except:",
        "  shop/web: 5 threads keep 6-7: kata-pin did not set it",
    ]


def test_a_release_with_a_failed_option_is_none(tmp_path: Path) -> None:
    """So `uninstall` keeps the service and its settings for another attempt."""
    config = from_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    failed = replace(NOTHING, options_failed=("option siren: it is broken",))
    with pytest.raises(StateError, match="option siren: it is broken"):
        release_pins(config, lambda _: failed)


def test_names_of_containers_are_printed_safely() -> None:
    """A runtime passes on any name: none may move the cursor or make a line of its own."""
    kept = (KeptCpuset("c", "shop/\x1b[2Jdb", "a\nb", "2-3"),)
    assert kept_cpusets(replace(NOTHING, cpusets_kept=kept))[1:] == [r"  shop/\x1b[2Jdb a\x0ab 2-3"]


async def test_release_by_the_daemon(tmp_path: Path) -> None:
    """With a daemon it is the daemon that releases, and nobody else."""
    asked: list[str] = []
    by_ourselves: list[Config] = []

    def release_all(chosen: Config) -> Applied:
        by_ourselves.append(chosen)
        return NOTHING

    async def release(_: Fields) -> bytes:
        asked.append("release")
        return encode(NOTHING)

    async def ping(_: Fields) -> bytes:
        return b"{}"

    with runtime_directory() as directory:
        verbs = {"release": release, "ping": ping}
        server = ControlServer(str(directory / "control.sock"), verbs)
        config = from_text(f"version: 1\nruntime_dir: {directory}\n")
        async with server.serving():
            said = await asyncio.to_thread(release_pins, config, release_all)
    assert said == "restored all affinities (by the daemon)"
    assert (asked, by_ourselves) == (["release"], [])


def test_commands(tmp_path: Path, capsys: Capture) -> None:
    """Both commands work below a root, print what they did, and ask no daemon of this machine."""
    below = ["--root", str(tmp_path)]
    assert run(["install", *below, "--crio", "--program", "/usr/bin/kata-pin"]) == 0
    output = capsys.readouterr().out
    assert f"wrote     {HOOK_PATH}" in output
    assert "systemctl" not in output
    assert run(["uninstall", *below]) == 0
    assert f"removed   {HOOK_PATH}" in capsys.readouterr().out
    assert tree(tmp_path) == {}


def test_document(tmp_path: Path, capsys: Capture) -> None:
    """With --json the same comes as a document."""
    assert run(["install", "--root", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["kind"]) == (2, "install")
    assert {"verb": "wrote", "path": HOOK_PATH, "reason": ""} in document["changes"]
    assert document["remarks"] == [NO_HOOKS]


def test_settings_are_those_below_the_root(tmp_path: Path) -> None:
    """With --root the settings are read below it, not on this machine."""
    (tmp_path / "etc/other").mkdir(parents=True)
    (tmp_path / "etc/other/config.yaml").write_text("version: 1\ngroup: ops\n")
    assert run(["install", "--root", str(tmp_path), "--config", "/etc/other/config.yaml"]) == 0
    assert "Group=ops\n" in (tmp_path / UNIT[1:]).read_text()
    assert "--config /etc/other/config.yaml" in (tmp_path / UNIT[1:]).read_text()


@pytest.mark.parametrize(
    "options",
    [["--program", "/root/venv/bin/kata-pin"], ["--config", "/home/me/kata-pin.yaml"]],
)
def test_what_the_service_cannot_see_is_refused(options: list[str], capsys: Capture) -> None:
    """A program, an interpreter or settings in a home: the service would not start."""
    assert run(["install", *options]) == 1
    assert "the service cannot see" in capsys.readouterr().err
    assert not Path(MANIFEST).exists()


def test_a_relative_program_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """Unit and link would lead nowhere."""
    below = ["--root", str(tmp_path)]
    assert run(["install", *below, "--program", "bin/kata-pin"]) == 1
    assert "--program bin/kata-pin is not an absolute path" in capsys.readouterr().err
    assert tree(tmp_path) == {}


def test_the_link_of_an_earlier_install_means_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the link would be removed as no longer wanted, and the unit would name it."""
    link = tmp_path / "kata-pin"
    link.symlink_to(PROGRAM)
    monkeypatch.setattr("kata_pin.cli.commands.install.PROGRAM_LINK", str(link))
    assert program_file(str(link)) == PROGRAM
    assert program_file("/usr/local/bin/kata-pin") == "/usr/local/bin/kata-pin"
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "absent"))
    assert program_file(None) == PROGRAM, "a package's program is in no folder of Python's"


def test_programs_must_exist(capsys: Capture, tmp_path: Path) -> None:
    """On this machine itself an absent interpreter is refused before anything is written."""
    program = tmp_path / "kata-pin"
    program.touch(0o755)
    assert run(["install", "--program", str(program), "--python", "/absent/python3"]) == 1
    assert "/absent/python3 is not an executable file" in capsys.readouterr().err
    assert not Path(MANIFEST).exists()


def test_what_a_killed_install_left_is_removed(tmp_path: Path) -> None:
    """A file that was not complete yet has another name."""
    node = NodeFiles(str(tmp_path))
    node.install([NodeFile("/etc/kata-pin/x.json", b"{}")])
    (tmp_path / "etc/kata-pin/x.json.new").write_text("{")
    node.uninstall()
    assert not (tmp_path / "etc/kata-pin").exists()


def test_a_fifo_in_place_of_a_file_is_kept(tmp_path: Path) -> None:
    """It is not read: that would never end."""
    node = NodeFiles(str(tmp_path))
    node.install([NodeFile("/etc/kata-pin/x.json", b"{}")])
    path = tmp_path / "etc/kata-pin/x.json"
    path.unlink()
    os.mkfifo(path)
    (change,) = node.uninstall()
    assert (change.verb, change.reason) == ("kept", "modified since it was installed")
    (change,) = node.install([NodeFile("/etc/kata-pin/x.json", b"{}")])
    assert change.verb == "kept"
