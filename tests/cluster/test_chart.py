"""The chart with real helm: what it renders and refuses; the manifests are its output."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kata_pin.options.cluster.values import NODE_ROOT
from kata_pin.service.configuration import from_text
from kata_pin.service.runtime_dir import NODE_LOCK
from tests.support.controlplane import programs

PROJECT = Path(__file__).resolve().parents[2]
CHARTS = PROJECT / "hooks" / "charts"
CHART = CHARTS / "kata-pin"

NEEDS_HELM = pytest.mark.skipif(
    not (programs() / "cluster").exists(), reason="no helm here: scripts/cluster builds it"
)

EVERYTHING = (
    "monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true,"
    "monitoring.dashboard.enabled=true,openshift.scc=true,createNamespace=true,oldKernels=true,"
    "reporter.address=$(HOST_IP)"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm on the chart, without a cluster."""
    return subprocess.run(
        [str(programs() / "helm"), *arguments],
        capture_output=True, text=True, check=False, timeout=50,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )  # fmt: skip


def rendered(*settings: str) -> list[dict[str, Any]]:
    """Return the objects that the chart renders with values."""
    done = helm(
        *("template", "kata-pin", str(CHART), "-n", "kata-pin", "--kube-version", "1.34.1"),
        *(word for one in settings for word in ("--set", one)),
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def one_of(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only object of a kind."""
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


# ---- without helm ----------------------------------------------------------------------------


def manifest() -> list[dict[str, Any]]:
    """Return the objects of the committed manifest."""
    return [one for one in yaml.safe_load_all((CHARTS / "kata-pin.yaml").read_text()) if one]


def test_the_daemon_has_its_rights_and_no_more() -> None:
    """No privilege, no token, no port; each folder of the node is mounted as later mounts need."""
    pod = one_of(manifest(), "DaemonSet")["spec"]["template"]["spec"]
    daemon, reporter = pod["containers"]
    (check,) = pod["initContainers"]
    assert pod["automountServiceAccountToken"] is False
    assert (pod["hostPID"], pod["priorityClassName"]) == (True, "system-node-critical")
    assert pod["nodeSelector"] == {"katacontainers.io/kata-runtime": "true"}
    assert "ports" not in daemon
    assert daemon["securityContext"]["privileged"] is False
    assert daemon["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": [
            *("SYS_NICE", "SYS_PTRACE", "DAC_READ_SEARCH", "DAC_OVERRIDE", "PERFMON"),
            *("SETUID", "SETGID", "CHOWN"),
        ],
    }
    context = reporter["securityContext"]
    assert (context["runAsNonRoot"], context["capabilities"]) == (True, {"drop": ["ALL"]})
    capabilities = check["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": ["DAC_READ_SEARCH"]}
    seen = [one for one in daemon["volumeMounts"] if one["name"] not in {"runtime-dir", "nri"}]
    assert check["volumeMounts"] == seen
    assert [one["name"] for one in reporter["volumeMounts"]] == ["config", "runtime-dir", "token"]
    assert "token" not in [one["name"] for one in daemon["volumeMounts"] + check["volumeMounts"]]
    assert all(
        one["securityContext"]["readOnlyRootFilesystem"] for one in (daemon, check, reporter)
    )
    (here,) = (one["mountPath"] for one in daemon["volumeMounts"] if one["name"] == "runtime-dir")
    assert here == os.path.dirname(NODE_LOCK)
    for mount in daemon["volumeMounts"]:
        assert not mount["mountPath"].startswith("/usr"), "read-only on some nodes"
        if mount["name"] not in {"config", "runtime-dir"}:
            assert mount["mountPropagation"] == "HostToContainer"
        assert mount["name"] in {"runtime-dir", "nri"} or mount["readOnly"] is True


def test_the_daemon_is_never_guaranteed() -> None:
    """A Guaranteed pod with whole CPUs would get exclusive ones from the kubelet."""
    spec = one_of(manifest(), "DaemonSet")["spec"]
    for one in spec["template"]["spec"]["containers"]:
        assert one["resources"]["requests"] != one["resources"].get("limits")
        assert "cpu" not in one["resources"]["limits"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_the_configuration_is_valid() -> None:
    """What the chart brings is what `config check`, its first container, accepts."""
    config = one_of(manifest(), "ConfigMap")["data"]["config.yaml"]
    assert from_text(config).nri.enabled.value == "yes"


def test_every_value_is_in_the_schema() -> None:
    """So that a misspelt one is refused wherever it is."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert list(_unknown(values, schema)) == []


def _unknown(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        inner = schema["properties"].get(name)
        if inner is None:
            found.append(f"{path}{name}")
        elif "properties" in inner:
            assert inner["additionalProperties"] is False, f"{path}{name}"
            found += _unknown(value, inner, f"{path}{name}.")
    return found


def test_the_values_that_doctor_names_exist() -> None:
    """In a pod doctor's remedies are values of the chart."""
    from kata_pin.base.values import Remedy
    from kata_pin.cli.reports import words

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = [one.value for one in vars(words).values() if isinstance(one, Remedy)]
    for path in filter(None, named):
        value: Any = values
        for part in path.split("."):
            assert part in value, path
            value = value[part]


# ---- with helm -------------------------------------------------------------------------------


@NEEDS_HELM
def test_the_manifests_are_what_helm_renders(tmp_path: Path) -> None:
    """scripts/manifests writes them."""
    subprocess.run([PROJECT / "scripts" / "manifests", str(tmp_path)], check=True, timeout=50)
    for name in ("kata-pin.yaml", "kata-pin-undo.yaml"):
        assert (tmp_path / name).read_text() == (CHARTS / name).read_text(), name


@NEEDS_HELM
def test_lint() -> None:
    """Helm finds nothing wrong."""
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@NEEDS_HELM
@pytest.mark.parametrize(
    "setting",
    ["hostNetwrk=true", "paths.kublet=/x", "reporter.port=0", "image.pullPolicy=Never2",
     "monitoring.podMonitor.enable=true", "maxUnavailable=0", "config=3",
     "config.runtime_dir=/run/other", "resources.daemon.limits.cpu=2000m", "paths.vc=/",
     "paths.more={/}", "paths.nri=//run", "paths.vc=/run/../etc", "paths.more={/etc/kata-pin}",
     "paths.kubelet=/run/kata-pin/", "paths=null", "image=null", "image.repository=null",
     "config=null", "reporter=null", "monitoring=null", "undo=null", "resources.daemon=null",
     "maxUnavailable=0%", "maxUnavailable=200%", "seccompProfile.type=Localhost",
     "appArmorProfile.localhostProfile=x", "reporter.address=localhost", "reporter.address=",
     "reporter.startupTaint=-", "reporter.startupTaint=kata-pin.io/",
     "monitoring.podMonitor.interval=soon"],
)  # fmt: skip
def test_wrong_values_are_refused(setting: str) -> None:
    """Unknown keys and impossible values end the installation before it begins."""
    done = helm("template", "x", str(CHART), "--kube-version", "1.34.1", "--set", setting)
    assert done.returncode != 0
    assert "values don't meet the specifications" in done.stderr, done.stderr


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("hostNetwork=false", "hostNetwork=false needs reporter.address=0.0.0.0"),
        ("hostNetwork=false,reporter.address=::1", "hostNetwork=false needs reporter.address"),
        ("hostNetwork=false,reporter.address=$(HOST_IP)", "hostNetwork=false needs"),
        ("monitoring.podMonitor.enabled=true", "needs a reporter.address that Prometheus reaches"),
        ("monitoring.podMonitor.enabled=true,reporter.enabled=false", "needs reporter.enabled"),
        ("reporter.startupTaint=a/b,reporter.enabled=false", "startupTaint needs reporter.enabled"),
        ("reporter.nodeResourceTopology=true,reporter.enabled=false", "needs reporter.enabled"),
        ("reporter.startupTaint=a/b,reporter.admissionPolicy=false", "needs reporter.admission"),
        ("reporter.nodeResourceTopology=true,reporter.admissionPolicy=false", "needs reporter.adm"),
        (
            "kataClasses.enabled=true,kataClasses.nodes=true,undo.enabled=false",
            "needs undo.enabled",
        ),
    ],
)
def test_values_that_do_not_work_together_are_refused(settings: str, said: str) -> None:
    """Each alone is possible."""
    done = helm("template", "x", str(CHART), "--kube-version", "1.34.1", "--set", settings)
    assert done.returncode != 0
    assert said in done.stderr


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ("reporter.port=9110", "127.0.0.1"),
        ("reporter.address=::1", "::1"),
        ("reporter.address=$(HOST_IP)", None),  # the kubelet expands no variable in a probe
        ("reporter.address=0.0.0.0", None),
        ("hostNetwork=false,reporter.address=0.0.0.0", None),
    ],
)
def test_probes_reach_the_reporter(settings: str, host: str | None) -> None:
    """Loopback by its address, everything else by the pod's, which is the kubelet's default."""
    pod = one_of(rendered(settings), "DaemonSet")["spec"]["template"]["spec"]
    probes = [
        probe["httpGet"]
        for one in pod["containers"]
        for name, probe in one.items()
        if name.endswith("Probe")
    ]
    assert [(one["path"], one["port"], one.get("host")) for one in probes] == [
        (path, 9110, host) for path in ("/livez", "/healthz", "/readyz")
    ]


@NEEDS_HELM
def test_what_values_add() -> None:
    """Monitoring with the project's own rules and dashboard, OpenShift, old kernels."""
    objects = rendered(EVERYTHING)
    kinds = [one["kind"] for one in objects]
    assert {"PodMonitor", "PrometheusRule", "SecurityContextConstraints", "Namespace"} <= set(kinds)
    rules = yaml.safe_load((PROJECT / "docs/monitoring/kata-pin.rules.yml").read_text())
    assert one_of(objects, "PrometheusRule")["spec"] == rules
    (board,) = (one for one in objects if one["metadata"]["name"] == "kata-pin-dashboard")
    text = (PROJECT / "docs/monitoring/kata-pin.dashboard.json").read_text()
    assert json.loads(board["data"]["kata-pin.json"]) == json.loads(text)
    daemon = one_of(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    added = daemon["securityContext"]["capabilities"]["add"]
    assert "NET_ADMIN" in added
    allowed = one_of(objects, "SecurityContextConstraints")["allowedCapabilities"]
    assert sorted(allowed) == sorted(added)


@NEEDS_HELM
def test_duties_of_the_reporter() -> None:
    """Each takes its value; only then the token has the right, and the policy bounds it."""

    def of(*settings: str) -> tuple[set[str], list[str], set[str]]:
        objects = rendered(*settings)
        (role,) = (one for one in objects if one["metadata"]["name"].endswith("-reporter")
                   and one["kind"] == "ClusterRole")  # fmt: skip
        policy = one_of(objects, "ValidatingAdmissionPolicy")["spec"]
        pod = one_of(objects, "DaemonSet")["spec"]["template"]["spec"]
        return (
            {resource for rule in role["rules"] for resource in rule["resources"]},
            pod["containers"][1]["args"][2:],
            {r for rule in policy["matchConstraints"]["resourceRules"] for r in rule["resources"]},
        )

    assert of()[1] == []
    assert "nodes" not in of()[0] | of()[2]
    rights, args, bounded = of("reporter.startupTaint=kata-pin.io/starting")
    assert (args, "nodes" in rights & bounded) == (["--startup-taint=kata-pin.io/starting"], True)
    rights, args, bounded = of("reporter.nodeResourceTopology=true")
    assert args == ["--node-resource-topology"]
    assert "noderesourcetopologies" in rights & bounded
    assert "nodes" not in rights


@NEEDS_HELM
def test_files_of_classes_on_nodes() -> None:
    """One more first container, with one right: it may write three folders of the node; the undo
    Job has it remove the files. Without the switch there is neither."""
    plain = rendered("kataClasses.enabled=true")
    assert "kata-class" not in json.dumps([one_of(plain, "DaemonSet"), one_of(plain, "Job")])
    on = ("kataClasses.enabled=true,kataClasses.nodes=true", "kataClasses.cpus={2,4}")
    objects = rendered(*on, "openshift.scc=true")
    pod = one_of(objects, "DaemonSet")["spec"]["template"]["spec"]
    _check, writer = pod["initContainers"]
    assert writer["args"] == [
        *("kata-class", "--write", f"--chroot={NODE_ROOT}", "--handler=kata-qemu-runtime-rs"),
        *("--cpus=2", "--cpus=4"),
    ]
    context = writer["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_CHROOT"]}
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    places = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    mounts = {one["mountPath"]: one for one in writer["volumeMounts"]}
    assert mounts.pop(NODE_ROOT)["readOnly"] is True
    written = ["/etc/containerd", "/etc/kata-containers", "/var/lib/kata-pin"]
    assert sorted(mounts) == [f"{NODE_ROOT}{folder}" for folder in written]
    assert [places[mounts[path]["name"]] for path in sorted(mounts)] == written
    assert "/" not in {places.get(one["name"]) for one in pod["containers"][0]["volumeMounts"]}
    (job,) = one_of(objects, "Job")["spec"]["template"]["spec"]["containers"]
    assert job["args"][-1] == "--kata-classes"
    assert "SYS_CHROOT" in one_of(objects, "SecurityContextConstraints")["allowedCapabilities"]


@NEEDS_HELM
def test_without_a_reporter() -> None:
    """No token, no rights, and no probe that nobody would answer."""
    objects = rendered("reporter.enabled=false")
    assert not [one for one in objects if one["kind"].startswith("ValidatingAdmission")]
    pod = one_of(objects, "DaemonSet")["spec"]["template"]["spec"]
    (daemon,) = pod["containers"]
    assert "livenessProbe" not in daemon
    assert "token" not in [one["name"] for one in pod["volumes"]]
