"""kubectl kata-pin as one file, with a kubectl that says what a test wants it to.

tests/cluster has it with the real one; only a cluster with nodes has the daemon's pod.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[3]
PLUGIN = PROJECT / "hooks" / "kubectl" / "kubectl-kata_pin"

KUBECTL = """\
import json, os, sys
answers = json.load(open(os.environ["ANSWERS"]))
words = sys.argv[1:]
for key, (status, text) in answers.items():
    if key in " ".join(words):
        (sys.stdout if status == 0 else sys.stderr).write(text)
        sys.exit(status)
print("CALLED", *words)
"""


def placement(node: str, *pods: tuple[str, str], **status: Any) -> dict[str, Any]:
    """Return a NodePlacement."""
    listed = [
        {"pod": pod, "sandbox": sandbox, "state": "ok", "exclusive": "4-5", "shared": ""}
        for pod, sandbox in pods
    ]
    ready = [{"type": "Ready", "status": "True", "reason": "Serving"}]
    facts = {"exclusiveCount": 2, "freeByNode": "0:6", "sandboxes": len(pods), "violations": 0}
    return {
        "metadata": {"name": node},
        "status": {"pods": listed, "conditions": ready, "version": "0.1.0", **facts, **status},
    }


DAEMON = {
    "metadata": {"name": "kp-1", "namespace": "kata-pin"},
    "spec": {"hostPID": True},
    "status": {"phase": "Running"},
}
TWO = [
    placement("n1", ("shop/web", "abc"), ("shop/db", "def")),
    placement("n2", ("lab/web", "ghi"), podsOmitted=3),
]


class Plugin:
    """The plugin beside the played kubectl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable} -IS\n{KUBECTL}")
        program.chmod(0o755)
        self.answers: dict[str, tuple[int, str]] = {"config view": (0, "shop")}
        self.listed("nodeplacements", TWO)
        self.listed("get pods", [DAEMON])

    def listed(self, what: str, items: list[dict[str, Any]]) -> None:
        """Answer with a list."""
        self.answers[what] = 0, json.dumps({"items": items})

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it."""
        answers = self._folder / "answers.json"
        answers.write_text(json.dumps(self.answers))
        return subprocess.run(
            [sys.executable, "-IS", str(PLUGIN), *arguments],
            capture_output=True, text=True, check=False, timeout=30,
            env={"PATH": f"{self._folder}", "ANSWERS": str(answers)},
        )  # fmt: skip


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def test_nodes(plugin: Plugin) -> None:
    """A table, one row per node; JSON on demand."""
    head, first, _ = plugin.run("nodes").stdout.splitlines()
    assert head.split() == [
        *("NODE", "READY", "EXCLUSIVE", "FREE", "SANDBOXES", "VIOLATIONS", "VERSION"),
    ]
    assert first.split() == ["n1", "True", "2", "0:6", "2", "0", "0.1.0"]
    assert len(json.loads(plugin.run("nodes", "n2", "-o", "json").stdout)["items"]) == 1
    done = plugin.run("nodes", "n9")
    assert (done.returncode, "no placement of node n9" in done.stderr) == (1, True)


def test_pods(plugin: Plugin) -> None:
    """Those of the context's namespace, of another one, or all."""
    assert [row.split()[0] for row in plugin.run("pods").stdout.splitlines()[1:]] == ["db", "web"]
    assert len(plugin.run("pods", "-n", "lab").stdout.splitlines()) == 2
    done = plugin.run("pods", "-A")
    assert [row.split()[:2] for row in done.stdout.splitlines()[1:]] == [
        ["lab", "web"], ["shop", "db"], ["shop", "web"],
    ]  # fmt: skip
    assert "3 sandboxes are not listed" in done.stderr
    assert json.loads(plugin.run("pods", "-A", "-o", "json").stdout)["omitted"] == 3


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("show", "web"), "/usr/bin/kata-pin show abc"),
        (("show", "lab/web", "-o", "json"), "/usr/bin/kata-pin --json show ghi"),
        (("prove", "web", "-n", "lab", "--for", "5s"), "/usr/bin/kata-pin prove --for 5s ghi"),
        (("top", "db"), "/usr/bin/kata-pin top def"),
    ],
)
def test_details(plugin: Plugin, arguments: tuple[str, ...], command: str) -> None:
    """kata-pin runs in the daemon's pod of the node, with the sandbox's id."""
    done = plugin.run(*arguments)
    assert done.stdout == f"CALLED exec -n kata-pin kp-1 -c daemon -- {command}\n", done.stderr


def test_a_pod_with_the_labels_alone_is_not_the_daemons(plugin: Plugin) -> None:
    """A tenant's answers would go to an administrator's terminal."""
    other = DAEMON | {"metadata": {"name": "x", "namespace": "tenant"}, "spec": {"hostPID": False}}
    plugin.listed("get pods", [other, DAEMON])
    assert "exec -n kata-pin kp-1" in plugin.run("show", "web").stdout
    plugin.listed("get pods", [other])
    done = plugin.run("show", "web")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no pod of kata-pin runs on node n1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nothing"), "no sandbox of pod shop/nothing"),
        (("show", "web", "-A"), "pod web is not unique: lab/web on n2, shop/web on n1"),
    ],
)
def test_pods_that_are_none(plugin: Plugin, arguments: tuple[str, ...], said: str) -> None:
    """The error names the pod, and what to do."""
    done = plugin.run(*arguments)
    assert (done.returncode, said in done.stderr, "hint:" in done.stderr) == (1, True, True)


def test_errors_of_kubectl(plugin: Plugin, tmp_path: Path) -> None:
    """Each has a hint; a missing kubectl and a wrong answer are errors too."""
    for text, hint in (
        ('the server doesn\'t have a resource type "nodeplacements"', "not installed"),
        ("Error from server (Forbidden): nodeplacements is forbidden", "ask for `get`"),
    ):
        plugin.answers["nodeplacements"] = 1, text
        done = plugin.run("nodes")
        assert (done.returncode, text in done.stderr, hint in done.stderr) == (1, True, True)
    refused = "The connection to the server localhost:8080 was refused"
    plugin.answers["nodeplacements"] = 1, f"E1124 11:27:53.2737 1 memcache.go:265] ...\n{refused}"
    assert plugin.run("nodes").stderr.startswith(f"kubectl kata-pin: {refused}")
    plugin.answers["nodeplacements"] = 0, "no json"
    assert "no list came back" in plugin.run("nodes").stderr
    plugin.listed("nodeplacements", TWO)
    plugin.listed("get pods", [])
    assert "no pod of kata-pin runs on node n1" in plugin.run("show", "web").stderr
    (tmp_path / "kubectl").unlink()
    assert "kubectl was not found" in plugin.run("nodes").stderr


def test_hostile_objects(plugin: Plugin) -> None:
    """No escape reaches the terminal, and no option the daemon's command."""
    plugin.listed(
        "nodeplacements", [placement("n1", ("shop/\x1b[31mred", "x"), ("shop/web", "--help"))]
    )
    done = plugin.run("pods")
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred" in done.stdout
    assert "impossible sandbox id" in plugin.run("show", "web").stderr
    assert "\x1b" not in plugin.run("__complete", "show", "").stdout
    plugin.listed("nodeplacements", [{}, {"status": None, "metadata": None}])
    assert plugin.run("nodes").returncode == 0


def test_completion(plugin: Plugin) -> None:
    """Commands, then pods; the script is what kubectl looks for."""
    assert plugin.run("__complete", "sh").stdout == "show\n:4\n"
    assert plugin.run("__complete", "show", "shop/").stdout == "shop/db\nshop/web\n:4\n"
    assert "__complete" in plugin.run("completion").stdout
    plugin.answers["nodeplacements"] = 1, "no"
    assert plugin.run("__complete", "show", "").stdout == ":4\n"


def test_the_archive_for_krew() -> None:
    """Its manifest has the archive's checksum; the archive has the same bytes twice."""
    sums = set()
    for _ in range(2):
        subprocess.run(
            [PROJECT / "scripts" / "krew", "https://x.example/a.tar.gz"],
            check=True, env={"PATH": os.environ["PATH"]}, timeout=30,
        )  # fmt: skip
        manifest = yaml.safe_load((PROJECT / "dist" / "kata-pin.yaml").read_text())
        (platform,) = manifest["spec"]["platforms"]
        sums.add(platform["sha256"])
    assert len(sums) == 1
    done = subprocess.run(
        ["tar", "-tzf", str(PROJECT / "dist" / "kubectl-kata_pin.tar.gz")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["kubectl-kata_pin", "LICENSE"]
