"""`kata-pin install --containerd` and `uninstall` beside the real containerd 1.7 and 2.4.

The command runs in containerd's own root file system, with this machine's interpreter: what it
reads, writes and asks is what it would on a node.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kata_pin.cli.node.containerd import CONFIG
from kata_pin.cli.node.files import HOOK_PATH, SPECS
from tests.support.containerd import (
    PROJECT,
    RELEASES,
    Containerd,
    Release,
    only_built,
    only_debians,
    private_containerd,
    why_not,
)
from tests.support.daemon import private_node
from tests.support.waiting import SCALE

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.skipif(why_not() != "", reason=why_not()),
]

SPEC = f"{SPECS}kata.json"
RUNTIMES = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata]\n'

INSIDE = """
import os, sys
import kata_pin.service.offline  # its libraries are this machine's
os.chroot(sys.argv[1]); os.chdir("/")
from tests.support.commandline import run
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


@pytest.fixture
def containerd(release: Release) -> Iterator[Containerd]:
    folder = Path(tempfile.mkdtemp(prefix="ci"))
    with private_node() as node, private_containerd(folder, node.dirs, release=release) as one:
        one.link_config()
        yield one
    shutil.rmtree(folder)


def kata_pin(containerd: Containerd, *arguments: str) -> str:
    """Run the command in containerd's root file system; return its output."""
    interpreter = str(PROJECT / ".venv/bin/python")
    done = subprocess.run(
        [*containerd.entered(), interpreter, "-c", INSIDE, containerd.place, *arguments],
        capture_output=True, text=True, check=False, timeout=100 * SCALE, cwd=PROJECT,
        env={"PATH": containerd.path, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dumped(containerd: Containerd) -> Any:
    """Return the plugins' settings as containerd reads them, and the handler `kata`."""
    plugins = tomllib.loads(containerd.dump())["plugins"]
    return plugins, handlers_in(plugins)["kata"]


def handlers_of(containerd: Containerd) -> dict[str, Any]:
    """Return containerd's runtime handlers by their names."""
    return handlers_in(tomllib.loads(containerd.dump())["plugins"])


def handlers_in(plugins: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime handlers of the CRI plugin."""
    for name in ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"):
        if "containerd" in plugins.get(name, {}):
            handlers: dict[str, Any] = plugins[name]["containerd"]["runtimes"]
            return handlers
    raise AssertionError(sorted(plugins))


def etc(containerd: Containerd) -> dict[str, bytes]:
    """Return containerd's configuration files, and every file of ours."""
    found = {}
    for folder in ("etc/containerd", "etc/kata-pin", "usr/libexec/kata-pin", "var/lib/kata-pin"):
        listed = (
            containerd.run("find", f"/{folder}", "-type", "f") if containerd.has(folder) else ""
        )
        for path in listed.split():
            found[path] = containerd.run("base64", path).encode()
    return found | {"config": (containerd.shared / "config.toml").read_bytes()}


def hooks_of(containerd: Containerd, name: str) -> tuple[str, dict[str, Any]]:
    """Make a pod with one container; return the pod and the container's spec."""
    pod = containerd.cri.run_pod(name, "kata")
    container = containerd.cri.create(pod, "c1", pod_name=name)
    return pod, containerd.spec(container)


def check_a_container(containerd: Containerd) -> None:
    """A new container has our hooks beside containerd's own settings, and starts."""
    pod, spec = hooks_of(containerd, "after")
    assert {entry["path"] for entry in spec["hooks"]["createRuntime"]} == {HOOK_PATH}
    assert set(spec["hooks"]) == {"createRuntime", "createContainer", "poststart", "poststop"}
    assert not spec["process"].get("rlimits"), "1024 open files would be a limit of ours"
    two = containerd.cri.create(pod, "c2", pod_name="after")
    containerd.cri.start(two)
    containerd.cri.stop_pod(pod)
    containerd.cri.remove_pod(pod)


def uninstall_completely(containerd: Containerd) -> None:
    """The hook stays until containerd runs without it; then nothing is left."""
    first = kata_pin(containerd, "uninstall")
    assert f"kept      {HOOK_PATH} (containerd runs with it" in first, first
    assert containerd.has(HOOK_PATH)
    pod, spec = hooks_of(containerd, "between")  # the running containerd still has the hooks
    assert "createRuntime" in spec["hooks"]
    containerd.cri.remove_pod(pod)
    containerd.restart()
    pod, spec = hooks_of(containerd, "without")
    assert "hooks" not in spec
    containerd.cri.remove_pod(pod)
    assert f"removed   {HOOK_PATH}" in kata_pin(containerd, "uninstall")


@only_built
@pytest.mark.parametrize("migrated", [True, False], ids=["newest", "version-2"])
def test_a_drop_in_where_files_are_merged(containerd: Containerd, migrated: bool) -> None:
    """One import, one drop-in of the file's version: the handler keeps its options, and uninstall
    leaves no byte."""
    config = containerd.shared / "config.toml"
    config.write_text(f'imports = ["/etc/containerd/conf.d/*.toml"]\n{config.read_text()}')
    if migrated:
        containerd.migrate()
    containerd.restart()
    before, (plugins, handler) = etc(containerd), dumped(containerd)
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert "wrote     /etc/containerd/conf.d/kata-pin.toml" in said
    assert said.endswith("systemctl restart containerd\n"), said
    changed, now = dumped(containerd)
    assert now == {**handler, "base_runtime_spec": SPEC}
    assert handler["options"]["BinaryName"].endswith("minikata")
    handler["base_runtime_spec"] = SPEC
    assert changed == plugins  # nothing else
    again = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert "wrote" not in again, again
    containerd.restart()
    check_a_container(containerd)
    uninstall_completely(containerd)
    assert etc(containerd) == before


@only_built
def test_an_import_that_is_missing_is_named(containerd: Containerd) -> None:
    """The drop-in is there, and one line is left to add."""
    containerd.migrate()
    config = containerd.shared / "config.toml"
    config.write_text(re.sub(r"(?m)^imports = .*$", "", config.read_text()))
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert f'in {CONFIG} add "/etc/containerd/conf.d/*.toml" to the top-level list imports' in said
    assert dumped(containerd)[1]["base_runtime_spec"] == ""


@only_debians
def test_lines_where_tables_are_replaced(containerd: Containerd) -> None:
    """1.7: a drop-in would drop the plugin's other settings, so the line to add is printed."""
    config = containerd.shared / "config.toml"
    config.write_text(f'imports = ["/etc/containerd/conf.d/*.toml"]\n{config.read_text()}')
    before, (plugins, handler) = etc(containerd), dumped(containerd)
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert not containerd.has("/etc/containerd/conf.d/kata-pin.toml"), said
    assert dumped(containerd) == (plugins, handler)
    header, line = (one.strip() for one in said.splitlines() if "base_runtime_spec" in one or
                    one.strip().startswith("[plugins"))  # fmt: skip
    assert header.replace('"kata"', "kata") == RUNTIMES.strip()
    original = config.read_text()
    added = original.replace(RUNTIMES, f"{RUNTIMES}{line}\n")
    config.write_text(added)
    assert dumped(containerd)[1] == {**handler, "base_runtime_spec": SPEC}
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert said.endswith("systemctl restart containerd\n"), said
    containerd.restart()
    check_a_container(containerd)
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert said.endswith("nothing is left to do\n"), said
    said = kata_pin(containerd, "uninstall")  # the line is still there: nothing may dangle
    assert f"kept      {SPEC} (named by {CONFIG})" in said, said
    assert f"remove the lines base_runtime_spec = {SPECS}... from {CONFIG}\n" in said, said
    assert "left: user and group kata-pin" in said, said
    containerd.restart()
    config.write_text(original)
    uninstall_completely(containerd)
    assert etc(containerd) == before


@only_debians
def test_the_line_goes_where_the_table_is(containerd: Containerd) -> None:
    """kata-deploy's table is in a file that is imported, which replaces the one of config.toml."""
    config, added = containerd.shared / "config.toml", containerd.shared / "kata.d/kata-deploy.toml"
    added.parent.mkdir()
    added.write_text(config.read_text())
    config.write_text(f'version = 2\nimports = ["{added.parent}/*.toml"]\n')
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert f"In {added} set\n" in said
    line = f'base_runtime_spec = "{SPEC}"\n'
    assert line in said
    added.write_text(added.read_text().replace(RUNTIMES, RUNTIMES + line))
    said = kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    assert said.endswith("hooks:\n  systemctl restart containerd\n"), said
    containerd.restart()
    check_a_container(containerd)
    added.write_text(added.read_text().replace(line, ""))  # config.toml does not change
    uninstall_completely(containerd)


def test_a_handlers_own_spec_is_the_base(containerd: Containerd) -> None:
    """What an administrator put into it stays, limits and hooks too."""
    own: dict[str, Any] = json.loads(containerd.run("ctr", "oci", "spec"))
    own["process"]["rlimits"] = [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}]
    own["hooks"] = {"poststop": [{"path": "/bin/true"}]}
    (containerd.shared / "own.json").write_text(json.dumps(own))
    config = containerd.shared / "config.toml"
    line = f'base_runtime_spec = "{containerd.shared}/own.json"\n'
    config.write_text(config.read_text().replace(RUNTIMES, RUNTIMES + line))
    kata_pin(containerd, "install", "--containerd", "--handler", "kata")
    merged = json.loads(containerd.run("cat", SPEC))
    assert merged["process"] == own["process"]
    assert [one["path"] for one in merged["hooks"]["poststop"]] == ["/bin/true", HOOK_PATH]


def test_containerd_does_not_start_without_its_spec(containerd: Containerd) -> None:
    """The fact that the order of uninstall rests on: its CRI plugin is missing then."""
    config = containerd.shared / "config.toml"
    config.write_text(
        config.read_text().replace(RUNTIMES, f'{RUNTIMES}base_runtime_spec = "/nowhere.json"\n')
    )
    containerd.stop()
    with pytest.raises(TimeoutError):
        containerd.start(seconds=5)
    assert "failed to load base OCI spec" in containerd.log


def with_kata(containerd: Containerd) -> str:
    """Give containerd a handler `real` with a configuration of Kata; return the latter."""
    config = containerd.shared / "config.toml"
    config.write_text(
        f'imports = ["/etc/containerd/conf.d/*.toml"]\n{config.read_text()}'
        f'{RUNTIMES.replace(".kata]", ".real]")}  runtime_type = "io.containerd.kata.v2"\n'
        f'{RUNTIMES.replace(".kata]", ".real.options]")}  ConfigPath = "/etc/kata/c.toml"\n'
    )
    kata = (
        '[hypervisor.qemu]\npath = "/q"\noverhead_vcpus = 0.2\n'
        '[runtime]\nhypervisor_name = "qemu"\nstatic_sandbox_resource_mgmt = true\n'
    )
    containerd.run("mkdir", "-p", "/etc/kata")
    containerd.run("sh", "-c", f"cat > /etc/kata/c.toml <<'END'\n{kata}END")
    containerd.restart()
    return kata


@only_built
def test_a_class_by_size(containerd: Containerd) -> None:
    """containerd gets one more handler, as its base but for Kata's configuration, and uninstall
    leaves no byte."""
    kata = with_kata(containerd)
    before, handlers = etc(containerd), handlers_of(containerd)
    ask = ("kata-class", "--cpus", "4", "--handler", "real")
    said = kata_pin(containerd, *ask)
    assert "+overhead_vcpus = 4.2" in said
    assert "nothing was written; run it again with --write" in said
    assert etc(containerd) == before
    said = kata_pin(containerd, *ask, "--write")
    assert "handler: real-cpus-4\n" in said
    path = "/etc/kata-containers/kata-pin/real-cpus-4/configuration.toml"
    assert containerd.run("cat", path) == kata
    now = handlers_of(containerd)
    added = now.pop("real-cpus-4")
    assert now == handlers
    assert added == {**handlers["real"], "options": {"ConfigPath": path}}
    assert "unchanged" in kata_pin(containerd, *ask, "--write")
    containerd.restart()
    assert f"removed   {path}" in kata_pin(containerd, "uninstall")
    assert etc(containerd) == before
    assert not containerd.has(path)


POD = """
set -e
host=$1 && shift
mount -t tmpfs tmpfs /mnt
mkdir /mnt/host
mount --rbind "$host" /mnt/host
mount -o remount,ro,bind /mnt/host
for folder in etc/containerd etc/kata-containers var/lib/kata-pin; do
    mkdir -p "$host/$folder"
    mount --bind "$host/$folder" "/mnt/host/$folder"
done
mount -t tmpfs tmpfs /mnt/host/run
TMPDIR=/run exec setpriv --bounding-set=-all,+sys_chroot --inh-caps=-all "$@" --chroot=/mnt/host
"""


def in_pod(containerd: Containerd, *arguments: str) -> str:
    """Run the command as the chart's container `kata-classes`: with its mounts and its right."""
    done = subprocess.run(
        [*containerd.entered(), "unshare", "--mount", "sh", "-c", POD, "sh", containerd.place,
         str(PROJECT / ".venv/bin/kata-pin"), *arguments],
        capture_output=True, text=True, check=False, timeout=100 * SCALE, cwd=PROJECT,
        env={"PATH": containerd.path, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@only_built
def test_classes_from_a_pod(containerd: Containerd) -> None:
    """With one capability and three folders that it may write; a second time nothing changes, and
    what the undo Job has it run leaves no byte. Where there is no such handler the pod goes on."""
    with_kata(containerd)
    containerd.run("mkdir", "-p", "/etc/kata-containers", "/var/lib/kata-pin")
    before, handlers = etc(containerd), handlers_of(containerd)
    write = ("kata-class", "--write", "--handler=real", "--cpus=2", "--cpus=4")
    assert "wrote" in in_pod(containerd, *write)
    now = handlers_of(containerd)
    assert sorted(now.keys() - handlers.keys()) == ["real-cpus-2", "real-cpus-4"]
    assert {name: now[name] for name in handlers} == handlers
    again = in_pod(containerd, *write)
    assert ("wrote" in again, again.count("unchanged")) == (False, 6)
    said = in_pod(containerd, "kata-class", "--write", "--handler=none", "--cpus=2")
    assert said.startswith("no class on this node: none is not a handler of Kata")
    assert "removed" in in_pod(containerd, "kata-class", "--remove")
    assert etc(containerd) == before
