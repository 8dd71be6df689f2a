"""kubectl kata-pin as one file, with a kubectl that says what a test wants it to.

tests/cluster has it with the real one; only a cluster with nodes has the daemon's pod.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta
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
        "status": {
            "pods": listed, "conditions": ready, "version": "0.1.0",
            "daemonPod": f"kata-pin/kp-{node}", "lastAudit": time(0), **facts, **status,
        },
    }  # fmt: skip


def time(age_s: float) -> str:
    """Return when that was."""
    return f"{datetime.now(tz=UTC) - timedelta(seconds=age_s):%Y-%m-%dT%H:%M:%SZ}"


TWO = [
    placement("n1", ("shop/web", "abc"), ("shop/db", "def")),
    placement("n2", ("lab/web", "ghi"), podsOmitted=3),
]


def daemon_pod(node: str, kind: str = "DaemonSet", name: str = "kata-pin") -> dict[str, Any]:
    """Return the daemon's pod of a node."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "node"}
    return {
        "metadata": {"ownerReferences": [{"kind": kind, "controller": True}], "labels": labels},
        "spec": {"nodeName": node},
    }


class Plugin:
    """The plugin beside the played kubectl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable} -IS\n{KUBECTL}")
        program.chmod(0o755)
        self.answers: dict[str, tuple[int, str]] = {"config view": (0, "shop")}
        self.listed("nodeplacements", TWO)
        for node in ("n1", "n2"):
            self.answers[f"get pod kp-{node} "] = 0, json.dumps(daemon_pod(node))

    def listed(self, what: str, items: list[dict[str, Any]]) -> None:
        """Answer with a list."""
        self.answers[what] = 0, json.dumps({"items": items})

    def run(self, *arguments: str, terminal: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run it, on a terminal if one is given."""
        answers = self._folder / "answers.json"
        answers.write_text(json.dumps(self.answers))
        return subprocess.run(
            [sys.executable, "-IS", str(PLUGIN), *arguments],
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE, text=True, check=False, timeout=30,
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
    assert (done.returncode, "no NodePlacement of node n9" in done.stderr) == (1, True)


def test_nodes_that_report_no_more(plugin: Plugin) -> None:
    """What a reporter wrote last is no word of today; its pods are shown with a warning."""
    away = [{"type": "Ready", "status": "False", "reason": "DaemonAway", "message": "no answer"}]
    plugin.listed(
        "nodeplacements",
        [
            placement("dead", ("shop/web", "abc"), lastAudit=time(1000)),
            placement("away", ("shop/db", "def"), conditions=away, lastAudit=time(1000)),
            placement("well", ("shop/app", "ghi"), lastAudit=time(400)),
            {"metadata": {"name": "young"}},
        ],
    )
    ready = [row.split()[:2] for row in plugin.run("nodes").stdout.splitlines()[1:]]
    assert ready == [["away", "False"], ["dead", "Unknown"], ["well", "True"], ["young", "Unknown"]]
    assert "ReporterAway" in plugin.run("nodes", "dead", "-o", "wide").stdout
    first, second = plugin.run("pods").stderr.splitlines()
    assert first == "node away is not ready: DaemonAway: no answer; its pods as last reported"
    assert second.startswith("node dead is not ready: ReporterAway: nothing was reported since 20")


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
        (("map", "web", "-n", "shop", "-A", "--node", "n2"), "/usr/bin/kata-pin map ghi"),
        (("show", "ghi"), "/usr/bin/kata-pin show ghi"),
    ],
)
def test_details(plugin: Plugin, arguments: tuple[str, ...], command: str) -> None:
    """kata-pin runs in the daemon's pod of the node, with the sandbox's id."""
    done = plugin.run(*arguments)
    node = "n2" if "ghi" in command else "n1"
    assert done.stdout == f"CALLED exec -n kata-pin kp-{node} -c daemon -- {command}\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [(("show", "web"), "-it "), (("top", "web"), "-it "), (("show", "web", "-o", "json"), "")],
)
def test_on_a_terminal(plugin: Plugin, arguments: tuple[str, ...], flags: str) -> None:
    """The node's command gets it, so that it knows the width; a document needs none."""
    ours, theirs = pty.openpty()
    try:
        plugin.run(*arguments, terminal=theirs)
        assert f"CALLED exec {flags}-n kata-pin" in os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_pod_of_several_sandboxes(plugin: Plugin) -> None:
    """The object of a node that is away may still have it; a node or a sandbox id chooses."""
    plugin.listed(
        "nodeplacements",
        [placement("n1", ("shop/web", "abc")), placement("n2", ("shop/web", "xyz"))],
    )
    done = plugin.run("show", "web")
    assert "shop/web on n1 (sandbox abc), shop/web on n2 (sandbox xyz)" in done.stderr
    assert "--node" in done.stderr
    for choice in (("web", "--node", "n2"), ("xyz",)):
        assert "kp-n2 -c daemon -- /usr/bin/kata-pin show xyz" in plugin.run("show", *choice).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nothing"), "no sandbox of pod shop/nothing"),
        (
            ("show", "web", "-A"),
            "pod web is not unique: lab/web on n2 (sandbox ghi), shop/web on n1",
        ),
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
    for wrong in ('{"items": 5}', '{"items": ' + "[" * 100_000, "5", "null"):
        plugin.answers["nodeplacements"] = 0, wrong
        done = plugin.run("nodes")
        assert (done.returncode, "no list came back" in done.stderr) == (1, True)
        assert "Traceback" not in done.stderr
    plugin.listed("nodeplacements", [placement("n1", ("shop/web", "abc"), daemonPod="-n x/y")])
    assert "does not name the daemon's pod" in plugin.run("show", "web").stderr
    plugin.listed("nodeplacements", TWO)
    plugin.answers["config view"] = 1, "error: current-context must exist in order to minify"
    assert "in namespace default" in plugin.run("pods").stderr
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
    foreign: tuple[object, ...] = (
        None, 3, [],
        {"pods": 3, "conditions": [3], "podsOmitted": "x"},
        {"pods": [3, {"pod": 3}], "conditions": {}, "lastAudit": 3, "version": "\udc80é"},
    )  # fmt: skip
    for status in foreign:
        plugin.listed("nodeplacements", [{}, {"status": status, "metadata": None}])
        for command in (("nodes", "-o", "wide"), ("pods", "-A"), ("__complete", "show", "")):
            done = plugin.run(*command)
            assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
        assert "no sandbox of pod" in plugin.run("show", "web").stderr


def test_completion(plugin: Plugin) -> None:
    """Commands, then pods; the script is what kubectl looks for."""
    assert plugin.run("__complete", "sh").stdout == "show\n:4\n"
    assert plugin.run("__complete", "show", "shop/").stdout == "shop/db\nshop/web\n:4\n"
    assert plugin.run("__complete", "show", "-n", "shop", "w").stdout == "web\n:4\n"
    assert plugin.run("__complete", "nodes", "").stdout == "n1\nn2\n:4\n"
    assert plugin.run("__complete", "pods", "--node", "n1").stdout == "n1\n:4\n"
    assert plugin.run("__complete", "pods", "-n", "").stdout == "lab\nshop\n:4\n"
    assert plugin.run("__complete", "pods", "-o", "").stdout == "json\nwide\n:4\n"
    assert plugin.run("__complete", "show", "--n").stdout == "--namespace\n--node\n:4\n"
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


@pytest.mark.parametrize(
    "found",
    [daemon_pod("n1", "Node"), daemon_pod("n1", name="etcd"), daemon_pod("n2"), {}, {"spec": 5}],
)
def test_a_node_can_name_no_pod_but_the_daemons(plugin: Plugin, found: dict[str, Any]) -> None:
    """Nothing is run in a static pod such as etcd, in one of another node, or in one unknown."""
    plugin.answers["get pod kp-n1 "] = 0, json.dumps(found)
    done = plugin.run("show", "db")
    assert (done.returncode, "CALLED" in done.stdout) == (1, False)
    assert "not a pod of kata-pin's DaemonSet" in done.stderr


def test_a_node_prints_no_escapes(plugin: Plugin) -> None:
    """What a command prints on the node, and says of errors, is text alone; tables stay tables."""
    plugin.answers["exec"] = 0, "NAME\tCPUS\n\x1b]52;c;eA==\x07web\t4-5\né\r\x9b2J"
    done = plugin.run("show", "web")
    assert done.stdout == "NAME\tCPUS\n\\x1b]52;c;eA==\\x07web\t4-5\né\\r\\x9b2J"
    plugin.answers["exec"] = 3, "\x1b[2Jno\n"
    done = plugin.run("show", "web")
    assert (done.returncode, done.stderr) == (3, "\\x1b[2Jno\n")
