"""What `kata-pin install` puts on a node, and what `uninstall` leaves, below another root."""

from __future__ import annotations

import ast
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

from tests.support.commandline import run

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).parents[4]
PROGRAM = "/opt/kata-pin/bin/kata-pin"
ALL = ("--crio", "--podman", "--containerd")
PHASES = {"createRuntime", "prestart", "createContainer", "poststart", "poststop"}

HOOK = "/usr/libexec/kata-pin/kata-pin-hook"
HOOKS_DIR = "/usr/share/containers/oci/hooks.d"
UNIT = "/usr/lib/systemd/system/kata-pin.service"
DROP_INS = f"{UNIT}.d"
LINK = "/usr/bin/kata-pin"
CONFIG = "/etc/kata-pin/config.yaml"
MANIFEST = "/var/lib/kata-pin/installed"
DOCUMENTS = "/usr/share/doc/kata-pin"
COMPLETIONS = {
    "bash": "/usr/share/bash-completion/completions/kata-pin",
    "zsh": "/usr/share/zsh/site-functions/_kata-pin",
    "fish": "/usr/share/fish/vendor_completions.d/kata-pin.fish",
}


class Node:
    """A root below which kata-pin is installed."""

    def __init__(self, root: Path, capsys: Capture) -> None:
        self.root = root
        self._capsys = capsys

    def path(self, name: str) -> Path:
        """Return where a file of the node is."""
        return self.root / name[1:]

    def write(self, name: str, text: str) -> Path:
        """Write a file of the node."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def settings(self, text: str) -> None:
        """Write the settings, as an administrator does before `install`."""
        self.write(CONFIG, f"version: 1\n{text}\n")

    def install(self, *options: str, program: str = PROGRAM) -> list[dict[str, str]]:
        """Install; return the change of each file."""
        return self._done("install", "--program", program, *options)

    def uninstall(self) -> list[dict[str, str]]:
        """Uninstall; return the change of each file."""
        return self._done("uninstall")

    def refused(self, *options: str, verb: str = "install") -> str:
        """Return what the command says that fails."""
        self._capsys.readouterr()
        assert run([verb, "--root", str(self.root), *options]) == 1
        return " ".join(self._capsys.readouterr().err.split())

    def contents(self, *options: str) -> dict[str, bytes]:
        """Install; return every file with its content."""
        self.install(*options)
        return self.tree()

    def tree(self) -> dict[str, bytes]:
        """Return every file with its content; of a link where it leads."""
        return {
            f"/{p.relative_to(self.root)}": os.readlink(p).encode()
            if p.is_symlink()
            else p.read_bytes()
            for p in self.root.rglob("*")
            if p.is_symlink() or p.is_file()
        }

    def _done(self, verb: str, *options: str) -> list[dict[str, str]]:
        self._capsys.readouterr()
        assert run([verb, "--root", str(self.root), "--json", *options]) == 0
        found: list[dict[str, str]] = json.loads(self._capsys.readouterr().out)["changes"]
        return found


@pytest.fixture
def node(tmp_path: Path, capsys: Capture) -> Node:
    """Return a root with nothing below it."""
    (tmp_path / "root").mkdir()
    return Node(tmp_path / "root", capsys)


def verbs(changes: list[dict[str, str]]) -> set[str]:
    return {change["verb"] for change in changes}


def paths(changes: list[dict[str, str]], verb: str) -> set[str]:
    return {change["path"] for change in changes if change["verb"] == verb}


def test_hook_program_is_the_hook(node: Node) -> None:
    """The installed hook holds hook.py unchanged, and is executable."""
    content = node.contents("--python", "/opt/python/bin/python3.12")[HOOK]
    assert content.startswith(b"#!/opt/python/bin/python3.12 -IS\n")
    [source] = [
        ast.literal_eval(statement.value)
        for statement in ast.parse(content).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SOURCE"
    ]
    assert source == (ROOT / "kata_pin/hook.py").read_text()
    assert node.path(HOOK).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("python", ["python3", "/a b/python3", "/" + "x" * 300, ""])
def test_interpreter_that_a_first_line_can_not_hold(node: Node, python: str) -> None:
    """An interpreter that the kernel would not find is refused."""
    assert "cannot be the interpreter" in node.refused("--python", python)


@pytest.mark.parametrize("same", [True, False])
def test_installed_hook_runs(node: Node, *, same: bool) -> None:
    """The installed file runs by its own first line, also under another version of Python."""
    node.install("--python", os.path.realpath(sys.executable))
    program = node.path(HOOK)
    text, code = program.read_text(), re.compile(r'(?<=^CODE = ")\w+', re.MULTILINE)
    if same:  # its source is not needed
        assert MAGIC_NUMBER.hex() in text
        program.write_text(text.replace("def hand_over", "def gone"))
    else:  # its code is not
        text = text.replace(MAGIC_NUMBER.hex(), "00000000")
        program.write_text(code.sub("00", text))
    done = subprocess.run(
        [program, "poststop", f"--runtime-dir={node.root}/absent"],
        input=b"{}", env={}, capture_output=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith(b"kata-pin-hook: neither recorded")


def test_hooks_dir_for_crio(node: Node) -> None:
    """CRI-O gets one file a phase, for every container, as oci-hooks(5) describes them."""
    files = node.contents("--crio")
    for phase in ("createRuntime", "poststart", "poststop"):
        assert json.loads(files[f"{HOOKS_DIR}/90-kata-pin-{phase}.json"]) == {
            "version": "1.0.0",
            "hook": {"path": HOOK, "args": ["kata-pin-hook", phase], "timeout": 10},
            "when": {"always": True},
            "stages": [phase],
        }
    assert sum(path.startswith(HOOKS_DIR) for path in files) == 3


def test_hooks_dir_for_podman(node: Node) -> None:
    """podman's hooks are by annotation; beside CRI-O's, which podman reads too, there are none."""
    name = f"{HOOKS_DIR}/90-kata-pin-createRuntime.json"
    alone = json.loads(node.contents("--podman")[name])
    [(key, value)] = alone["when"]["annotations"].items()
    assert re.search(key, "io.kata-pin.enable")
    assert re.search(value, "true")
    assert node.contents("--podman", "--crio") == node.contents("--crio")


def test_containerd_fragment(node: Node) -> None:
    """The base runtime spec's hooks are for Kata only and so hold createContainer too."""
    files = node.contents("--containerd", "--prestart")
    hooks = json.loads(files["/etc/kata-pin/containerd-hooks.json"])["hooks"]
    assert set(hooks) == PHASES
    for phase, [entry] in hooks.items():
        assert entry["path"] == HOOK
        assert entry["args"] == ["kata-pin-hook", phase]


def test_settings_become_arguments(node: Node) -> None:
    """Settings that differ from the hook's own defaults are in its arguments, no others are."""
    node.settings("runtime_dir: /run/other\nhook: {record_ms: 90, pin_ms: 80, strict: true}")
    files = node.contents("--podman")
    arguments = json.loads(files[f"{HOOKS_DIR}/90-kata-pin-poststop.json"])["hook"]["args"]
    assert arguments[2:] == [
        "--runtime-dir=/run/other",
        "--record-ms=90",
        "--pin-ms=80",
        "--strict",
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        # strict hooks for every container would fail those that no VMM runs
        ("hook: {strict: true}", "does not use Kata"),
        ("runtime_dir: /var/lib/kata-pin", "not below /run"),  # it would outlive a boot
    ],
)
def test_settings_that_cannot_be_installed(node: Node, settings: str, said: str) -> None:
    """Nothing is written."""
    node.settings(settings)
    assert said in node.refused("--crio", "--program", PROGRAM)
    assert list(node.tree()) == [CONFIG]


def unit_of(text: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    taken_away = "SystemCallFilter=~"  # the second line of this list; nothing else is there twice
    given_back = "SystemCallFilter=capset"  # the third
    assert text.count(taken_away) == text.count(given_back) == 1
    text = text.replace(given_back, "AllowedCalls=capset")
    parser.read_string(text.replace(taken_away, "RefusedCalls="))
    return parser["Service"]


def test_unit_has_the_rights_it_needs(node: Node) -> None:
    """The service has what its broker needs, and none of the limits that would blind it."""
    service = unit_of(node.contents()[UNIT].decode())
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
    ("settings", "drop_ins"),
    [
        ("", {}),
        ("resctrl: {enabled: false}\nquiet: report", {}),
        # resctrl takes threads from root only, and must be writable
        (
            "resctrl: {enabled: true}",
            {"resctrl.conf": ("User=root\n", "ReadWritePaths=-/sys/fs/resctrl\n")},
        ),
        ('rt: {vcpus: "fifo:1"}', {"realtime.conf": ("RestrictRealtime=no\n",)}),
        # everything but /proc/irq stays read-only
        (
            "quiet: irq",
            {"quiet.conf": ("ProtectKernelTunables=no\nReadOnlyPaths=/proc/sys /sys ",)},
        ),
        (
            "quiet: full",
            {
                "quiet.conf": ("ProtectKernelTunables=no\nReadOnlyPaths=/proc/sys /sys ",),
                "quiet-full.conf": ("ReadWritePaths=/sys/devices\n",),
            },
        ),
    ],
)
def test_rights_that_only_settings_give(
    node: Node, settings: str, drop_ins: dict[str, tuple[str, ...]]
) -> None:
    """Each has a drop-in of the unit; below another root there is that for old kernels too."""
    node.settings(settings)
    files = node.contents()
    names = {os.path.basename(path) for path in files if path.startswith(DROP_INS)}
    assert names == {*drop_ins, "before-linux-6.6.conf"}
    for name, texts in drop_ins.items():
        for text in texts:
            assert text in files[f"{DROP_INS}/{name}"].decode()


def test_no_placeholder_is_left(node: Node) -> None:
    """Every placeholder of the assets is filled in, and each setting reaches its files."""
    node.settings("runtime_dir: /run/other\ngroup: ops\nuser: pinner")
    files = node.contents(*ALL)
    assert not [path for path, content in files.items() if re.search(rb"@[A-Z_]+@", content)]
    assert b"d /run/other/spool  0700 pinner ops -" in files["/usr/lib/tmpfiles.d/kata-pin.conf"]
    users = files["/usr/lib/sysusers.d/kata-pin.conf"]
    assert b'u pinner - "kata-pin daemon"\nm pinner ops\n' in users
    assert b"g ops -" in users
    assert b"RuntimeDirectory=other kata-pin\n" in files[UNIT]
    assert b"Group=ops\n" in files[UNIT]


def test_the_man_page_and_the_documents_of_json_are_installed(node: Node) -> None:
    """Where man(1) and people look, as they are in docs/."""
    files, docs = node.contents(), ROOT / "docs"
    assert files["/usr/share/man/man8/kata-pin.8"] == (docs / "kata-pin.8").read_bytes()
    assert files[f"{DOCUMENTS}/json.md"] == (docs / "json.md").read_bytes()
    schemas = {f"{DOCUMENTS}/schema/{one.name}" for one in (docs / "schema").iterdir()}
    assert schemas <= set(files)


def test_the_built_package_has_what_is_installed(tmp_path: Path) -> None:
    """The links to hooks/ and docs/ become files of the wheel."""
    copy = tmp_path / "source"
    shutil.copytree(
        ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "*.egg-info")
    )
    subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build", "-b", "out"],
        cwd=copy, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    built = copy / "out" / "lib" / "kata_pin" / "cli"
    for name in ("assets/systemd/kata-pin.service", "documents/kata-pin.8", "documents/json.md"):
        assert (built / name).is_file()
    assert len(list((built / "documents/schema").iterdir())) == len(
        list((ROOT / "docs/schema").iterdir())
    )
    assert not (built / "documents/design.md").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_where_shells_look(node: Node, shell: str, capsys: Capture) -> None:
    """The same script that `completion` prints; it asks by the variable that main() reads."""
    found = node.contents()[COMPLETIONS[shell]].decode()
    assert run(["completion", shell]) == 0
    assert found == capsys.readouterr().out
    assert f"_KATA_PIN_COMPLETE={shell}_complete" in found


def test_completion_works_in_a_real_shell(node: Node) -> None:
    """bash, with the installed script and the link in its PATH, completes a command."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    node.install(program=str(Path(sys.executable).with_name("kata-pin")))
    code = (
        f"PATH={node.root}/usr/bin:$PATH; . {node.root}{COMPLETIONS['bash']}; "
        "COMP_WORDS=(kata-pin expl); COMP_CWORD=1; _kata_pin_completion kata-pin; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "explain\n"


def test_the_program_is_linked_into_the_path(node: Node) -> None:
    """The link is made, repaired after an upgrade to another place, and goes with the rest."""
    node.install()
    assert os.readlink(node.path(LINK)) == PROGRAM
    assert paths(node.install(program="/opt/new"), "wrote") == {LINK, UNIT}
    assert os.readlink(node.path(LINK)) == "/opt/new"
    assert LINK in paths(node.uninstall(), "removed")
    assert not node.path(LINK).is_symlink()


@pytest.mark.parametrize("own", ["file", "link"])
def test_a_program_of_somebody_else_is_kept(node: Node, own: str) -> None:
    """A package's program, or a link that leads elsewhere, is neither replaced nor removed."""
    link = node.write(LINK, "a package's")
    if own == "link":
        link.unlink()
        link.symlink_to("/elsewhere")
    assert paths(node.install(), "kept") == {LINK}
    node.uninstall()
    assert list(node.tree()) == [LINK]


def test_no_link_to_itself(node: Node) -> None:
    """A program that is already there needs none."""
    node.install(program=LINK)
    assert LINK not in node.tree()


def test_install_is_idempotent(node: Node) -> None:
    """A second install changes nothing, and a fresh one writes everything and no more."""
    first = node.install(*ALL)
    assert verbs(first) == {"wrote"}
    before = node.tree()
    assert verbs(node.install(*ALL)) == {"unchanged"}
    assert node.tree() == before
    assert set(before) == paths(first, "wrote") | {MANIFEST}


def test_manifest_is_for_sha256sum(node: Node) -> None:
    """sha256sum(1) can check what was installed."""
    manifest = node.contents(*ALL)[MANIFEST].replace(b"  /", b"  ")
    check = ["sha256sum", "-c", "--quiet", "-"]
    subprocess.run(check, input=manifest, cwd=node.root, check=True, timeout=20)


def test_uninstall_leaves_nothing(node: Node) -> None:
    """What install wrote is gone afterwards, folders of its own too; strangers' files stay."""
    node.write("/etc/passwd", "root")
    node.install(*ALL)
    assert verbs(node.uninstall()) == {"removed"}
    assert node.tree() == {"/etc/passwd": b"root"}
    assert not list(node.root.rglob("kata-pin*"))
    assert node.uninstall() == []


def test_changed_files_are_kept(node: Node) -> None:
    """A file that somebody changed is neither overwritten nor removed."""
    node.install(*ALL)
    changed = {UNIT, CONFIG}
    for path in changed:
        node.write(path, "version: 1\n")
    node.path(LINK).unlink()
    assert paths(node.install(*ALL, program="/opt/kata-pin"), "kept") == changed
    assert paths(node.uninstall(), "kept") == changed
    left = node.tree()
    left.pop(MANIFEST)
    assert left == dict.fromkeys(changed, b"version: 1\n")


def test_file_of_somebody_else_is_kept(node: Node) -> None:
    """A file that was there before the first install is not overwritten, nor later removed."""
    node.write(UNIT, "from a package")
    node.install()
    node.uninstall()
    assert node.tree() == {UNIT: b"from a package"}


def test_new_choices_replace_old_ones(node: Node) -> None:
    """Files of an earlier choice that is no longer wanted go; those of another version change."""
    node.install("--crio", "--prestart")
    changes = node.install("--podman")
    found = {
        one["path"].rpartition("-")[2]: one["verb"]
        for one in changes
        if one["path"].startswith(HOOKS_DIR)
    }
    assert found == {
        "prestart.json": "removed", "createRuntime.json": "wrote",
        "poststart.json": "wrote", "poststop.json": "wrote",
    }  # fmt: skip


def test_hook_that_containerd_names_stays(node: Node) -> None:
    """The hook stays while a base runtime spec names it: a missing hook fails containers."""
    text = json.dumps({"hooks": {"poststop": [{"path": HOOK}]}})
    spec = node.write("/etc/containerd/kata.json", text)
    line = '  base_runtime_spec = "/etc/containerd/kata.json"\n'
    node.write("/etc/containerd/config.toml", line)
    node.install("--containerd")
    [kept] = [change for change in node.uninstall() if change["verb"] == "kept"]
    assert kept["path"] == HOOK
    assert "kata.json" in kept["reason"]
    spec.unlink()
    assert [change["path"] for change in node.uninstall()] == [HOOK]
    assert not node.path(HOOK).exists()


def test_links_do_not_lead_out_of_the_root(node: Node, tmp_path: Path) -> None:
    """A link below --root that points outside is not followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (node.root / "usr").symlink_to(outside)
    assert "out of" in node.refused("--program", PROGRAM)
    assert list(outside.iterdir()) == []


def test_a_file_that_is_a_link_out_of_the_root(node: Node, tmp_path: Path) -> None:
    """Neither what it names nor what a new file's name leads to is read or written."""
    unit = node.contents()[UNIT]
    node.uninstall()
    outside = tmp_path / "outside"
    outside.write_bytes(unit)
    for name in (UNIT, f"{HOOK}.new"):
        node.path(name).parent.mkdir(parents=True, exist_ok=True)
        node.path(name).symlink_to(outside)
    assert paths(node.install(), "kept") == {UNIT}
    assert outside.read_bytes() == unit
    assert node.path(HOOK).read_bytes().startswith(b"#!")
    assert not node.path(HOOK).is_symlink()


def test_folders_are_open_to_users_whatever_the_umask(node: Node) -> None:
    """Their containers run the hook, their commands read the settings."""
    before = os.umask(0o077)
    try:
        node.install(*ALL)
    finally:
        os.umask(before)
    made = [path for path in node.root.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o755}


@pytest.mark.parametrize("line", ["garbage", f"{'0' * 64}  /etc/../../outside"])
def test_bad_manifest(node: Node, line: str) -> None:
    """A manifest that is not one stops the command instead of removing what it says."""
    node.write(MANIFEST, f"{line}\n")
    assert "sha256sum" in node.refused(verb="uninstall")


class Killed(BaseException):
    """As good as a SIGKILL: nobody cleans up after it."""


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


def test_what_a_failing_install_wrote_is_known(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the node that is read-only: the error names it, and uninstall removes the rest."""
    stop_writing(monkeypatch, OSError(errno.EROFS, "Read-only file system"))
    assert f"{node.root}/etc/kata-pin" in node.refused("--program", PROGRAM)
    monkeypatch.undo()
    assert node.path(HOOK).exists()
    changes = node.uninstall()
    assert [(one["verb"], one["path"]) for one in changes] == [("removed", HOOK)]
    assert not [one for one in node.tree() if "kata-pin" in one]


@pytest.mark.parametrize("where", ["/etc/kata-pin/", MANIFEST])
def test_what_a_killed_install_wrote_is_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also the file that was being written, and where there is no manifest yet."""
    stop_writing(monkeypatch, Killed(), where)
    with pytest.raises(Killed):
        node.install(*ALL)
    monkeypatch.undo()
    node.uninstall()
    assert not list(node.root.rglob("*kata-pin*"))


def test_what_a_killed_install_wrote_is_ours(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken for a package's that was written just before the power failed."""
    stop_writing(monkeypatch, Killed())
    with pytest.raises(Killed):
        node.install(*ALL)
    monkeypatch.undo()
    assert node.path(HOOK).exists()
    assert "kept" not in verbs(node.install(*ALL))


def test_a_read_only_usr(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that are made so have another way to run kata-pin."""
    stop_writing(monkeypatch, OSError(errno.EROFS, "Read-only file system"), "/usr/libexec/")
    said = node.refused("--program", PROGRAM)
    assert re.search(r"cannot write .*kata-pin-hook: Read-only", said)
    assert "docs/cluster.md" in said


def test_what_is_kept_is_said_once(node: Node) -> None:
    """Uninstalling has two rounds, before and after the affinities."""
    node.install(*ALL)
    for path in node.path(HOOKS_DIR).iterdir():
        path.write_text("mine")
    changed = [change["path"] for change in node.uninstall()]
    assert len(set(changed)) == len(changed)


def test_what_people_read(node: Node, capsys: Capture) -> None:
    """Both commands print what they did, and ask no daemon of this machine."""
    below = ["--root", str(node.root)]
    assert run(["install", *below, "--crio", "--program", "/usr/bin/kata-pin"]) == 0
    output = capsys.readouterr().out
    assert f"wrote     {HOOK}" in output
    assert "systemctl" not in output
    assert run(["uninstall", *below]) == 0
    assert f"removed   {HOOK}" in capsys.readouterr().out
    assert node.tree() == {}


def test_document(node: Node, capsys: Capture) -> None:
    """With --json the same comes as a document."""
    assert run(["install", "--root", str(node.root), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["version"], document["kind"]) == (2, "install")
    assert {"verb": "wrote", "path": HOOK, "reason": ""} in document["changes"]
    (remark,) = document["remarks"]
    assert remark.startswith("no hooks installed: a runtime with NRI needs none")


def test_settings_are_those_below_the_root(node: Node) -> None:
    """With --root the settings are read below it, not on this machine."""
    node.write("/etc/other/config.yaml", "version: 1\ngroup: ops\n")
    node.install("--config", "/etc/other/config.yaml")
    unit = node.path(UNIT).read_text()
    assert "Group=ops\n" in unit
    assert "--config /etc/other/config.yaml" in unit


@pytest.mark.parametrize(
    "options",
    [["--program", "/root/venv/bin/kata-pin"], ["--config", "/home/me/kata-pin.yaml"]],
)
def test_what_the_service_cannot_see_is_refused(options: list[str], capsys: Capture) -> None:
    """A program, an interpreter or settings in a home: the service would not start."""
    assert run(["install", *options]) == 1
    assert "the service cannot see" in capsys.readouterr().err
    assert not Path(MANIFEST).exists()


def test_a_relative_program_is_refused(node: Node) -> None:
    """Unit and link would lead nowhere."""
    said = node.refused("--program", "bin/kata-pin")
    assert "--program bin/kata-pin is not an absolute path" in said
    assert node.tree() == {}


def test_programs_must_exist(capsys: Capture, tmp_path: Path) -> None:
    """On this machine itself an absent interpreter is refused before anything is written."""
    program = tmp_path / "kata-pin"
    program.touch(0o755)
    assert run(["install", "--program", str(program), "--python", "/absent/python3"]) == 1
    assert "/absent/python3 is not an executable file" in capsys.readouterr().err
    assert not Path(MANIFEST).exists()


def test_what_a_killed_install_left_is_removed(node: Node) -> None:
    """A file that was not complete yet has another name."""
    node.install()
    node.write(f"{CONFIG}.new", "{")
    node.uninstall()
    assert not node.path("/etc/kata-pin").exists()


def test_a_fifo_in_place_of_a_file_is_kept(node: Node) -> None:
    """It is not read: that would never end."""
    node.install()
    node.path(UNIT).unlink()
    os.mkfifo(node.path(UNIT))
    (kept,) = (change for change in node.uninstall() if change["verb"] == "kept")
    assert (kept["path"], kept["reason"]) == (UNIT, "modified since it was installed")
    assert paths(node.install(), "kept") == {UNIT}
