"""`install --containerd`: which files it makes and what it says is left, as containerd answers.

Beside a real containerd: tests/integration/test_install_containerd.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.answers import FileChange
from kata_pin.base.errors import KataPinError, ParseError
from kata_pin.cli.commands.install import install_plan, last_steps
from kata_pin.cli.main import run as run_command
from kata_pin.cli.node import changes as changes_module
from kata_pin.cli.node import containerd
from kata_pin.cli.node.changes import MANIFEST, MODIFIED, NodeFiles
from kata_pin.cli.node.files import HOOK_PATH, SPECS, UNIT, NodeFile
from kata_pin.peers.containerd import base_specs, parse_imports
from kata_pin.service.configuration import DEFAULT_FILE

HOOKS = {"poststop": [{"path": HOOK_PATH}]}
DEFAULT = {"ociVersion": "1.2.0", "process": {"cwd": "/", "rlimits": [{"soft": 1024}]}, "linux": {}}
SPEC = f"{SPECS}kata.json"
DROP_IN = "/etc/containerd/conf.d/kata-pin.toml"


class Fake:
    """containerd and ctr: one handler `kata`, and files that are merged or replaced."""

    def __init__(self, *, merges: bool = True, base: str = "", refuses: bool = False) -> None:
        self.merges = merges
        self.base = base
        self.refuses = refuses
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(" ".join(command))
        if command[0] == "ctr":
            return json.dumps(DEFAULT)
        added = Path(command[2]).with_name("kata-pin.toml")  # of the trial
        base, image = self.base, "pause:1"
        if added.exists():
            if self.refuses:
                raise KataPinError("containerd failed")
            (base,) = base_specs(added.read_text())
            image = image if self.merges else "default"
        return (
            'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\n'
            f'image = "{image}"\n'
            '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata]\n'
            f'runtime_type = "io.containerd.kata.v2"\nbase_runtime_spec = "{base}"\n'
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of containerd's and ours."""
    monkeypatch.setattr(containerd, "CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setattr(containerd, "SPECS", f"{tmp_path}/")
    return tmp_path


def test_a_drop_in_where_files_are_merged(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec comes before what names it; with the import a restart is all that is left."""
    (place / "config.toml").write_text('version = 3\nimports = ["/etc/other.d/*.toml"]\n')
    fake = Fake()
    plan = containerd.plan(HOOKS, (), fake)
    assert plan is not None
    assert [one.path for one in plan.files] == [f"{place}/kata.json", "/etc/other.d/kata-pin.toml"]
    spec = json.loads(plan.files[0].content)
    assert spec == {**DEFAULT, "process": {"cwd": "/"}, "hooks": HOOKS}
    (place / "kata.json").write_bytes(plan.files[0].content)
    (said,) = containerd.next_steps(plan, fake)  # not in effect yet
    assert 'add "/etc/other.d/*.toml" to the top-level list imports' in said
    fake.base = f"{place}/kata.json"
    started = 0.0
    monkeypatch.setattr(containerd, "running_since", lambda when: started < when)
    (said,) = containerd.next_steps(plan, fake)
    assert "imports" not in said
    assert said.endswith("systemctl restart containerd")
    started = time.time() + 60  # the restart, and the same command again
    (said,) = containerd.next_steps(plan, fake)
    assert said == "containerd: new Kata pods run the hooks, nothing is left to do"


def test_a_line_where_tables_are_replaced(place: Path) -> None:
    """No drop-in: it would drop the plugin's other settings."""
    fake = Fake(merges=False)
    plan = containerd.plan(HOOKS, ("kata",), fake)
    assert plan is not None
    assert [one.path for one in plan.files] == [f"{place}/kata.json"]
    (place / "kata.json").write_bytes(plan.files[0].content)
    (said,) = containerd.next_steps(plan, fake)
    assert f'base_runtime_spec = "{place}/kata.json"' in said
    assert '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes."kata"]' in said


@pytest.mark.parametrize(
    ("text", "plugin", "version"),
    [("version = 2\n", "io.containerd.grpc.v1.cri", 2), ("", "cri", 1)],
)
def test_a_drop_in_of_the_files_version(place: Path, text: str, plugin: str, version: int) -> None:
    """A newer one keeps containerd 2.3 from starting; lines to add are of the same version."""
    (place / "config.toml").write_text(text)
    plan = containerd.plan(HOOKS, ("kata",), Fake())
    assert plan is not None
    written = plan.files[1].content.decode().splitlines()[1:]
    table = f'[plugins."{plugin}".containerd.runtimes."kata"]'
    assert written == [
        f"version = {version}",
        "",
        table,
        f'  base_runtime_spec = "{place}/kata.json"',
    ]
    fake = Fake(merges=False)
    plan = containerd.plan(HOOKS, ("kata",), fake)
    assert plan is not None
    assert table in containerd.next_steps(plan, fake)[0]


@pytest.mark.parametrize(
    "pattern",
    ["/etc/conf[.]d/*.toml", "/etc/x/../conf.d/*.toml", "/etc/*/*.toml", "conf.d/*.toml", "/etc/a"],
)
def test_a_folder_that_is_no_plain_path(place: Path, pattern: str) -> None:
    """containerd's own default is taken, and whether that is imported is asked afterwards."""
    (place / "config.toml").write_text(f'version = 3\nimports = ["{pattern}"]\n')
    plan = containerd.plan(HOOKS, (), Fake())
    assert plan is not None
    assert plan.drop_in == DROP_IN


def test_a_spec_of_ours_that_is_missing(place: Path) -> None:
    """What the handler had before is known without our drop-in only, so it goes first."""
    for base, said in ((f"{place}/kata.json", "kata-pin uninstall"), ("/nowhere/x", "correct")):
        with pytest.raises(KataPinError, match=f"handler kata names {base}") as caught:
            containerd.plan(HOOKS, (), Fake(base=base))
        assert said in caught.value.hint


def test_a_version_that_nobody_can_read_is_an_error(place: Path) -> None:
    """A drop-in may be newer then; nothing was written yet."""
    (place / "config.toml").write_text('version = "3"\n')
    with pytest.raises(ParseError, match=r"config\.toml: a version that is no number"):
        containerd.plan(HOOKS, (), Fake())


def test_a_node_without_a_configuration(place: Path) -> None:
    """containerd 1.7 cannot dump a file that is missing; what it runs with are its defaults."""
    fake = Fake()
    plan = containerd.plan(HOOKS, (), fake)
    assert plan is not None
    assert fake.asked[0] == "containerd config default"
    (place / "config.toml").write_text("")
    containerd.plan(HOOKS, (), fake)
    assert f"containerd --config {place}/config.toml config dump" in fake.asked


def test_the_drop_in_is_tried_behind_all_imports(place: Path) -> None:
    """containerd reads imports level by level; CONFIG's own could hide what the drop-in drops."""
    (place / "config.toml").write_text("version = 2\n")
    levels: list[list[str]] = []

    def run(command: Sequence[str]) -> str:
        file = Path(command[2])
        if file.with_name("kata-pin.toml").exists():
            while file.name != "kata-pin.toml":
                levels.append(list(parse_imports(file.read_text())))
                file = Path(levels[-1][-1])
        return Fake()(command)

    containerd.plan(HOOKS, (), run)
    assert [len(one) for one in levels] == [2, 1]
    assert levels[0][0] == f"{place}/config.toml"


def test_the_file_whose_table_counts_is_named(place: Path) -> None:
    """kata-deploy's table is in a file that is imported, and which replaces that of config.toml."""
    table = '[plugins."{}".containerd.runtimes.kata]\n'
    (place / "config.toml").write_text(
        'version = 2\nimports = ["kata.d/*.toml"]\n' + table.format("io.containerd.grpc.v1.cri")
    )
    (place / "kata.d").mkdir()
    (place / "kata.d/a.toml").write_text(table.format("cri"))
    (place / "kata.d/b.toml").write_text("broken")
    plan = containerd.plan(HOOKS, (), Fake(merges=False))
    assert plan is not None
    (said,) = containerd.next_steps(plan, Fake())
    header = '[plugins."cri".containerd.runtimes."kata"]'
    assert f"In {place}/kata.d/a.toml set\n  {header}\n" in said


def test_a_drop_in_that_a_later_file_overrides(place: Path) -> None:
    """It is imported, so nothing is to be added there."""
    folder = place / "conf.d"
    folder.mkdir()
    (place / "config.toml").write_text(f'version = 3\nimports = ["{folder}/*.toml"]\n')
    plan = containerd.plan(HOOKS, (), Fake())
    assert plan is not None
    (folder / "kata-pin.toml").write_bytes(plan.files[1].content)
    (folder / "z.toml").write_text(
        '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kata]'
    )
    (said,) = containerd.next_steps(plan, Fake())
    assert f"{folder}/kata-pin.toml has no effect: a file that is read later" in said
    assert f"In {folder}/z.toml set" in said
    assert "imports" not in said
    (folder / "kata-pin.toml").write_text("# half of it")
    (said,) = containerd.next_steps(plan, Fake())
    assert said.endswith("kata-pin.toml was modified: remove it, then run this again")


def test_no_drop_in_that_containerd_refuses(place: Path) -> None:
    """The trial's root has the version of the file; a refusal there would be one at a restart."""
    (place / "config.toml").write_text("version = 5\n")
    roots: list[str] = []

    def run(command: Sequence[str]) -> str:
        if Path(str(command[2])).with_name("kata-pin.toml").exists():
            roots.append(Path(command[2]).read_text().splitlines()[0])
        return Fake(refuses=True)(command)

    plan = containerd.plan(HOOKS, (), run)
    assert plan is not None
    assert not plan.drop_in
    assert roots == ["version = 5"]


def test_the_handlers_own_spec_is_the_base(place: Path) -> None:
    """Its limits are an administrator's; one that is missing or none is an error, not replaced."""
    own = place / "own.json"
    fake = Fake(base=str(own))
    with pytest.raises(KataPinError, match=r"own\.json"):
        containerd.plan(HOOKS, (), fake)
    own.write_text("[]")
    with pytest.raises(ParseError):
        containerd.plan(HOOKS, (), fake)
    own.write_text(json.dumps(DEFAULT))
    plan = containerd.plan(HOOKS, (), fake)
    assert plan is not None
    assert json.loads(plan.files[0].content)["process"] == DEFAULT["process"]
    assert "ctr oci spec" not in fake.asked


@pytest.mark.parametrize("text", ["{}", "{"])
def test_a_kept_spec_without_hooks_is_an_error(place: Path, tmp_path: Path, text: str) -> None:
    """Somebody wrote it, so it is kept: no drop-in may name it, not even for a moment."""
    root = tmp_path / "root"
    plan = containerd.plan(HOOKS, (), Fake())
    assert plan is not None
    assert plan.drop_in == DROP_IN
    for folder in (place, root / str(place)[1:]):  # of the check, and of the node
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kata.json").write_text(text)
    with pytest.raises(KataPinError, match=r"has no hook of kata-pin|kata\.json"):
        install_plan(NodeFiles(str(root)), (), plan, Fake())
    assert not (root / DROP_IN[1:]).exists()
    assert not (root / MANIFEST[1:]).exists(), "something was written before the check"


@pytest.mark.parametrize("broken", ["fails", "differs", "no handler"])
@pytest.mark.usefixtures("place")
def test_a_drop_in_that_has_another_effect_is_removed(tmp_path: Path, broken: str) -> None:
    """containerd's next restart would read it; the error says that it is gone."""
    root, fake = tmp_path / "root", Fake()
    plan = containerd.plan(HOOKS, (), fake)
    assert plan is not None

    def run(command: Sequence[str]) -> str:
        assert (root / DROP_IN[1:]).exists()
        if broken == "fails":
            raise KataPinError("containerd failed", hint="look there")
        if broken == "differs":
            return fake(command).replace("pause:1", "pause:2")
        return fake(command).replace("runtimes.kata]", "runtimes.other]")

    with pytest.raises(KataPinError, match=f"removed   {DROP_IN}") as caught:
        install_plan(NodeFiles(str(root)), (), plan, run)
    assert caught.value.hint == ("look there" if broken == "fails" else "")
    assert not (root / DROP_IN[1:]).exists()
    assert DROP_IN not in (root / MANIFEST[1:]).read_text()
    changes, (said,) = install_plan(NodeFiles(str(root)), (), plan, fake)  # another attempt
    assert [one.verb for one in changes] == ["unchanged", "wrote"]
    assert "imports" in said


@pytest.mark.usefixtures("place")
def test_handlers_that_are_not_there() -> None:
    """A name that containerd does not know is an error; no Kata at all is said by the caller."""
    with pytest.raises(KataPinError, match=r"no runtime handler kat .*it has kata"):
        containerd.plan(HOOKS, ("kat",), Fake())

    def without_kata(command: Sequence[str]) -> str:
        return Fake()(command).replace("kata.v2", "runc.v2")

    assert containerd.plan(HOOKS, (), without_kata) is None


def test_a_program_that_fails_is_quoted() -> None:
    """Its last line, and which program it was."""
    with pytest.raises(KataPinError, match=r"sh -c .* failed: broken config"):
        containerd.run_program(("sh", "-c", "echo x >&2; echo broken config >&2; exit 1"))
    logged = 'echo level=error msg=\\"x y\\" file=/etc/a.toml row=2 >&2; echo broken >&2; exit 1'
    with pytest.raises(KataPinError, match=r"broken \(/etc/a\.toml\)"):
        containerd.run_program(("sh", "-c", logged))
    with pytest.raises(KataPinError, match="/nonexistent: No such file"):
        containerd.run_program(("/nonexistent",))


class AsRoot(NodeFiles):
    """The node below a folder, which takes itself for `/`: containerd's start counts there."""

    def __init__(self, place: Path) -> None:
        super().__init__("/")
        self._place = place

    def _real(self, path: str) -> str:
        return path if path.startswith(str(self._place)) else f"{self._place}{path}"


# ---- removing them ---------------------------------------------------------------------------


def installed(root: Path) -> NodeFiles:
    """Install the files of a merging containerd below a root."""
    node = NodeFiles(str(root))
    text = f'version = 3\n[plugins.x.containerd.runtimes.kata]\nbase_runtime_spec = "{SPEC}"\n'
    spec = json.dumps({"hooks": HOOKS}).encode()
    node.install([NodeFile(HOOK_PATH, b""), NodeFile(SPEC, spec), NodeFile(DROP_IN, text.encode())])
    return node


def test_what_names_goes_before_what_is_named(tmp_path: Path) -> None:
    """Also when a later install no longer wants them."""
    changes = installed(tmp_path).uninstall()
    assert [one.path for one in changes] == [DROP_IN, SPEC, HOOK_PATH]
    changes = installed(tmp_path).install([NodeFile(HOOK_PATH, b"")])
    assert [one.path for one in changes if one.verb == "removed"] == [DROP_IN, SPEC]


def test_a_later_install_without_specs_waits_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd has specs in memory that name the hook: what goes is judged by its start."""
    installed(tmp_path)
    started = time.time() - 30
    os.utime(tmp_path / MANIFEST[1:], (started - 30, started - 30))
    monkeypatch.setattr(changes_module, "MANIFEST", str(tmp_path / MANIFEST[1:]))
    monkeypatch.setattr(containerd, "CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setattr(containerd, "FOLDER", str(tmp_path / "conf.d"))
    monkeypatch.setattr(changes_module, "running_since", lambda when: started < when)
    node = AsRoot(tmp_path)
    changes = {one.path: one.verb for one in node.install([NodeFile(HOOK_PATH, b"")])}
    assert changes == {HOOK_PATH: "unchanged", DROP_IN: "removed", SPEC: "kept"}
    assert {one.path: one.verb for one in node.uninstall()} == {SPEC: "kept", HOOK_PATH: "kept"}
    started = time.time() + 60  # the restart
    (tmp_path / "config.toml").write_text('imports = ["other.d/*.toml", "more.d/*.toml"]')
    for name in ("other.d/kata.toml", "more.d"):  # one was edited, in the other one was removed
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.touch() if place.suffix else place.mkdir()
        os.utime(place, (started + 60, started + 60))
        assert {one.verb for one in node.uninstall(lambda path: path == SPEC)} == {"kept"}
        os.utime(place, (started - 60, started - 60))
    changes = {one.path: one.verb for one in node.install([NodeFile(HOOK_PATH, b"")])}
    assert changes == {HOOK_PATH: "unchanged", SPEC: "removed"}
    assert {one.path: one.verb for one in node.uninstall()} == {HOOK_PATH: "removed"}


def test_without_a_plan_nothing_of_containerd_goes(tmp_path: Path) -> None:
    """`--containerd` where nobody answers: what an earlier one installed is still wanted."""
    installed(tmp_path)
    done = run_command(["install", "--root", str(tmp_path), "--containerd"])
    assert done == 0
    assert (tmp_path / DROP_IN[1:]).exists()
    assert (tmp_path / SPEC[1:]).exists()
    assert {DROP_IN, SPEC} <= set((tmp_path / MANIFEST[1:]).read_text().split())
    assert run_command(["install", "--root", str(tmp_path), "--podman"]) == 0
    assert not (tmp_path / DROP_IN[1:]).exists()
    assert not (tmp_path / SPEC[1:]).exists()


@pytest.mark.parametrize(
    "config", ["config.toml", "conf.d/admin.toml", "other/x.toml", "other/deep/x.toml"]
)
def test_nothing_that_a_file_names_is_removed(tmp_path: Path, config: str) -> None:
    """Neither the spec nor the hook that it runs; one that nobody can read may name them."""
    node = installed(tmp_path)
    file = tmp_path / "etc/containerd" / config
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "etc/containerd/other").mkdir(exist_ok=True)
    (tmp_path / "etc/containerd/other/more.toml").write_text('imports = ["deep/*.toml", "*"]\n')
    (tmp_path / "etc/containerd/config.toml").write_text('imports = ["other/*.toml"]\n')
    for text in (f'x = {{base_runtime_spec = "{SPEC}"}}\n', "= broken"):
        file.write_text(text)
        kept = {one.path for one in node.uninstall() if one.verb == "kept"}
        assert kept == {SPEC, HOOK_PATH}, text
    file.write_text(f'# base_runtime_spec = "{SPEC}"\nbase_runtime_spec = ""\n')
    assert [one.verb for one in node.uninstall()] == ["removed", "removed"]
    assert not (tmp_path / MANIFEST[1:]).exists()


def test_what_is_left_is_said_in_its_order(tmp_path: Path) -> None:
    """First the lines, then the restart, then the rest; each only as long as it is due."""
    spec = FileChange("kept", SPEC, "named by /etc/containerd/config.toml")
    hook = FileChange("kept", HOOK_PATH, f"used by containerd's {SPEC}")
    unit = FileChange("removed", UNIT)
    (said,) = last_steps([unit, spec, hook], "/opt/kata-pin/bin/kata-pin")
    assert said.splitlines() == [
        "next:",
        "  1. systemctl disable --now kata-pin; systemctl daemon-reload",
        f"  2. remove the lines base_runtime_spec = {SPECS}... from /etc/containerd/config.toml",
        "  3. systemctl restart containerd",
        "  4. /opt/kata-pin/bin/kata-pin uninstall, which removes the files kept",
    ]
    runs = "containerd runs with it: systemctl restart containerd, then run this again"
    (said,) = last_steps([replace(spec, reason=runs), replace(hook, reason=runs)], "kata-pin")
    assert said.splitlines()[1:] == [
        "  1. systemctl restart containerd",
        "  2. kata-pin uninstall, which removes the files kept",
    ]
    (said,) = last_steps([FileChange("removed", SPEC), FileChange("removed", HOOK_PATH)], "x")
    assert "hook error" in said
    assert "does no harm" in said
    changed = FileChange("kept", HOOK_PATH, "modified since it was installed")
    assert last_steps([changed, FileChange("kept", DEFAULT_FILE, MODIFIED)], "x") == []


@pytest.mark.parametrize("imported", [DROP_IN, "conf.d/../conf.d/kata-pin.toml"])
def test_a_drop_in_that_is_imported_by_name_stays(tmp_path: Path, imported: str) -> None:
    """containerd does not start without it, as it does without what a pattern matched."""
    node = installed(tmp_path)
    config = tmp_path / "etc/containerd/config.toml"
    config.write_text(f'imports = ["{imported}"]\n')
    changes = node.uninstall()
    assert {one.verb for one in changes} == {"kept"}
    assert "imported by name in /etc/containerd/config.toml" in changes[0].reason
    config.write_text('imports = ["/etc/containerd/conf.d/*.toml"]\n')
    assert {one.verb for one in node.uninstall()} == {"removed"}


def test_a_containerd_that_was_not_restarted(tmp_path: Path) -> None:
    """Its start is compared with the change; another program, or another root, is no containerd."""
    program = tmp_path / "containerd"
    program.symlink_to("/usr/bin/sleep")
    before = time.time() - 0.1
    with subprocess.Popen([program, "60"]) as process:
        try:
            os.sched_yield()
            deadline = time.monotonic() + 10
            while Path(f"/proc/{process.pid}/comm").read_text() != "containerd\n":
                assert time.monotonic() < deadline
            after = time.time() + 0.1
            assert containerd.running_since(after)
            started_here = {one for one in (before, before - 3600) if containerd.running_since(one)}
        finally:
            process.kill()
    assert started_here == set() or _another_containerd()


def _another_containerd() -> bool:
    """Whether this machine runs one itself."""
    return containerd.running_since(0.0)
