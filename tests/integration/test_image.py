"""The container image: the same twice, and at work on real QEMU with a pod's rights alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from kata_pin import __version__
from scripts.packages.parts import NOT_HERE, UNUSED
from tests.support import podrights
from tests.support.alone import left_alone
from tests.support.daemon import Json, Node, Pod, assert_unprivileged, is_away, private_node
from tests.support.ocirun import available, in_private_namespace
from tests.support.qemu import QEMU, busy_machine
from tests.support.vmmhost import PYTHON
from tests.support.waiting import SCALE, wait_for

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 24_000_000
NO_RIGHTS = ("--read-only", "--cap-drop", "all", "--network", "none", *podrights.OPTIONS[-4:])
IN_POD = ("--env", "KUBERNETES_SERVICE_HOST=10.0.0.1")

pytestmark = [
    pytest.mark.root,
    pytest.mark.oci,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available("podman"), reason="podman is not installed"),
]


class Podman:
    """podman with a storage of its own, which has the image."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self._folder = folder
        self.image = self.run("load", "--quiet", "--input", str(archive)).split()[-1]

    def run(self, *words: str) -> str:
        """Return the output of a command; fail with what it complained of."""
        done = self.tried(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tried(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return what became of it."""
        folders = ("--root", "storage"), ("--runroot", "run"), ("--tmpdir", "libpod")
        own = [word for option, name in folders for word in (option, f"{self._folder}/{name}")]
        own += ["--storage-driver", "vfs", "--events-backend", "file"]
        own += ["--cgroup-manager", "cgroupfs", "--runtime", "runc"]
        return subprocess.run(
            in_private_namespace(["podman", *own, *words]),
            capture_output=True,
            text=True,
            check=False,
            timeout=120 * SCALE,
        )


def build(folder: Path, *options: str, **env: str) -> tuple[str, Path]:
    """Build the image of the files as they are; return its digest and the archive."""
    done = subprocess.run(
        [str(ROOT / "scripts/image"), "--work-tree", "--folder", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VENV": sys.prefix, **env},
    )
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr)  # scripts/test says so too
    assert done.returncode == 0, done.stderr
    digest, path = done.stdout.split()
    return digest, Path(path)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return build(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def podman(archive: tuple[str, Path]) -> Iterator[Podman]:
    with loaded(archive[1]) as one:
        yield one
        one.run("rmi", "--force", one.image)


@contextmanager
def loaded(archive: Path) -> Iterator[Podman]:
    """Have podman with an image below a short path: its runroot has 50 characters at most."""
    with tempfile.TemporaryDirectory(prefix="pm") as folder:
        yield Podman(Path(folder), archive)


@pytest.fixture
def node() -> Iterator[Node]:
    """A node whose VMs are found in Kata's state alone: no hook, no bundle."""
    isolation = {"max_foreign": 15, "check_s": 1, "watch": False}
    audit = {"affinity_s": 1, "deep_s": 5}
    with private_node(user="kata-pin", audit=audit, isolation=isolation) as one:
        one.runtime_dir.mkdir()
        for name in ("debug", "cdi"):
            (one.root / name).mkdir()
        yield one


class Container:
    """The daemon's container on a node."""

    def __init__(self, podman: Podman, node: Node) -> None:
        self._podman = podman
        self.name = f"kata-pin-{node.root.name}"
        self._config = str(node.config)

    def exec(self, *words: str, env: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command of kata-pin in it, as `kubectl exec` does."""
        program = ["/usr/bin/kata-pin", *words, "--config", self._config]
        return self._podman.tried("exec", *env, self.name, *program)

    def document(self, *words: str) -> Json:
        """Return the document of a command."""
        done = self.exec(*words, "--json")
        assert done.stdout, done.stderr
        document: Json = json.loads(done.stdout)
        return document


def mounts(node: Node) -> dict[Path, str]:
    """Return the host's folders that a pod has; here the VMM and the shim lie with the system's."""
    kata = [node.dirs.vc, node.dirs.kata, node.root / "cdi", node.root / "debug"]
    read = dict.fromkeys([*kata, Path(QEMU), Path(PYTHON), node.config, podrights.CGROUPS], "ro")
    lock = Path("/run/kata-pin")  # a pod's runtime directory, which has the node's lock
    lock.mkdir(exist_ok=True)
    return {node.runtime_dir: "rw", lock: "rw", **read}


@contextmanager
def running(podman: Podman, node: Node) -> Iterator[Container]:
    """Run the daemon in a container with a pod's rights."""
    one = Container(podman, node)
    options = [*podrights.OPTIONS, *podrights.volumes(mounts(node))]
    command = ["--config", str(node.config), "run"]
    podman.run("run", "--detach", "--name", one.name, *options, podman.image, *command)
    try:
        wait_for(lambda: not is_away(node), "the daemon to answer", 60)
        yield one
    except BaseException as error:
        error.add_note(podman.tried("logs", one.name).stderr[-4000:])
        raise
    finally:
        podman.run("rm", "--force", one.name)


@pytest.mark.qemu
@pytest.mark.alone  # a busy machine loses windows, which prove nothing
@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two CPUs")
def test_isolation_with_a_pods_rights(podman: Podman, node: Node, tmp_path: Path) -> None:
    """Threads are pinned and isolated as measured, though the namespace hides names of cgroups."""
    home = os.sched_getaffinity(0)
    with node.pod("p1", machine=busy_machine(tmp_path)) as pod:
        pod.persist("c1", "1", exclusive=True)
        with running(podman, node) as one:
            pod.wait_placed({1}, within_s=60)
            raw = podman.run("exec", one.name, "/usr/bin/python3", "-ISc", RAW)
            assert "/.." in raw  # else nothing here would need the names
            assert_unprivileged(one.document("show")["daemon"]["pid"])
            report = one.document("doctor")
            failed = [row for row in report["rows"] if row["status"] == "fail"]
            assert failed == []
            (cgroups,) = rows(report, "cgroups")
            assert (cgroups["status"], "/sys/fs/cgroup" in cgroups["text"]) == ("ok", True)
            assert rows(report, "task switches")[0]["status"] == "ok"
            assert rows(report, "process events")[0]["status"] == "ok"
            (affinities,) = rows(report, "affinities")  # tried with a program that the image has
            assert "No such file" not in affinities["text"]
            verdict = isolated(one, pod)
            assert verdict["measured"]["method"] == "perf"
            assert (verdict["verdict"], verdict["unknown"]) == ("ok", [])
            shown = {thread["cgroup"] for thread in node.sandboxes()["p1"]["threads"]}
            assert shown == {host_cgroup(pod.kata.pid)}
    os.sched_setaffinity(0, home)


@pytest.mark.qemu
def test_beside_a_daemon_of_the_node(podman: Podman, node: Node) -> None:
    """Whichever starts second says who holds the lock and since when, and ends with status 1."""
    said = re.compile(
        r"another kata-pin .* \(process [1-9]\d*.*, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"
    )
    with running(podman, node) as one:
        second = node.cli("run")
        assert (second.returncode, said.search(second.stderr) is None) == (1, False), second.stderr
        assert one.exec("--version").returncode == 0
    first = node.start()
    options = [*podrights.OPTIONS, "--rm", *podrights.volumes(mounts(node))]
    command = (podman.image, "--config", str(node.config), "run")
    done = podman.tried("run", *options, *command)
    assert (done.returncode, said.search(done.stderr) is None) == (1, False), done.stderr
    assert f"process {first.pid}" in done.stderr


RAW = "print(open('/proc/1/cgroup').read())"


def isolated(one: Container, pod: Pod) -> Json:
    """Return the verdict on a pod whose vCPU has its pCPU to itself."""
    with left_alone(pod.kata.vcpus()[0]):
        one.exec("check", "--for", "0.1s")  # imports
        return one.document("check", "--for", "1s")


def host_cgroup(pid: int) -> str:
    """Return the path of a process's cpuset cgroup, as this process of the host reads it."""
    entries = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    paths = {name: path for _, names, path in entries for name in names.split(",")}
    return paths.get("cpuset") or paths[""]


def test_without_the_hosts_cgroups_doctor_fails(podman: Podman, node: Node) -> None:
    """It names the value of the chart inside a pod, and podman's options outside."""
    options = [*podrights.OPTIONS, "--rm", *podrights.volumes({node.config: "ro"})]
    command = (podman.image, "doctor", "--json", "--config", str(node.config))
    for env, remedy in ((IN_POD, "the chart's value paths.cgroup"), ((), "--pid host")):
        done = podman.tried("run", *options, *env, *command)
        assert done.returncode == 1, done.stderr
        (row,) = rows(json.loads(done.stdout), "cgroups")
        assert row["status"] == "fail"
        assert "process 1 is not visible" in row["text"]
        assert remedy in row["remedy"]


def test_the_default_seccomp_profile_is_named(podman: Podman, node: Node) -> None:
    """What it refuses is a row of doctor, with the value of the chart."""
    at = podrights.OPTIONS.index("seccomp=unconfined")
    options = [*podrights.OPTIONS[: at - 1], *podrights.OPTIONS[at + 1 :]]
    done = podman.tried(
        *("run", "--rm", *options, *podrights.volumes({node.config: "ro"}), *IN_POD),
        *(podman.image, "doctor", "--json", "--config", str(node.config)),
    )
    (row,) = rows(json.loads(done.stdout), "task switches")
    assert row["status"] == "warn"
    assert "the chart's value seccompProfile" in row["remedy"]


def test_every_module_is_there(podman: Podman) -> None:
    """What is left out of the standard library and of the wheels is imported by nothing."""
    code = (
        "import importlib, pkgutil, sys\n"
        "sys.path.append('/usr/lib/kata-pin')\n"
        "import kata_pin\n"
        "for one in pkgutil.walk_packages(kata_pin.__path__, 'kata_pin.'):\n"
        "    if not one.name.endswith('__main__'): importlib.import_module(one.name)\n"
        "import rich.table, rich.live, ssl, sqlite3\n"
        "import google.protobuf.internal.api_implementation as used\n"
        "print(used.Type(), len(sys.modules))\n"
    )
    words = ("--entrypoint", "/usr/bin/python3", podman.image, "-ISBc", code)
    kind, modules = podman.run("run", "--rm", *NO_RIGHTS, *words).split()
    assert kind == "upb"
    assert int(modules) > 500


def test_the_kubelets_apis_can_be_asked(tmp_path: Path) -> None:
    """With --cri the image has grpcio, which those are asked with."""
    _, archive = build(tmp_path, "--cri")
    assert archive.name == f"kata-pin-{__version__}-cri-amd64.oci.tar"
    assert "grpcio" in {one["name"] for one in bill(archive)["components"]}
    locked = (ROOT / "requirements-cri.lock").read_text().split("grpcio==")[1].split()[0]
    code = (
        "import sys; sys.path.append('/usr/lib/kata-pin')\n"
        "from kata_pin.peers.cri import GrpcSocket\n"
        "import grpc\n"
        "print(grpc.__version__, GrpcSocket('/run/none', 1.0).problem)\n"
    )
    with loaded(archive) as one:
        words = ("--entrypoint", "/usr/bin/python3", one.image, "-ISBc", code)
        assert one.run("run", "--rm", *NO_RIGHTS, *words).split() == [locked]


def test_the_same_twice(archive: tuple[str, Path], tmp_path: Path) -> None:
    """With another cache, umask, time zone and folder the digest is the same."""
    before = os.umask(0o077)
    try:
        again = build(tmp_path / "a", XDG_CACHE_HOME=str(tmp_path / "cache"), TZ="Asia/Tokyo")
    finally:
        os.umask(before)
    if bill(again[1])["components"] != bill(archive[1])["components"]:
        archive = build(tmp_path / "b", "--refresh")  # Debian has newer packages
    assert again[0] == archive[0]
    assert again[1].read_bytes() == archive[1].read_bytes()


def bill(archive: Path) -> Json:
    document: Json = json.loads(archive.with_suffix("").with_suffix(".cdx.json").read_text())
    return document


def test_what_it_is_made_of(archive: tuple[str, Path]) -> None:
    """Its size, no shell, and a bill of materials that has every locked library with its hash."""
    path = archive[1]
    assert path.stat().st_size < MOST_BYTES
    with tarfile.open(path) as outer:
        index = json.loads(read(outer, "index.json"))
        manifest = json.loads(blob(outer, index["manifests"][0]))
        config = json.loads(blob(outer, manifest["config"]))
        names = set()
        for one in manifest["layers"]:
            with tarfile.open(fileobj=io.BytesIO(blob(outer, one)), mode="r:gz") as layer:
                for entry in layer:
                    names.add(entry.name)
                    assert (entry.uid, entry.gid, entry.mtime) == (0, 0, 0)
                    assert entry.issym() or not entry.mode & 0o6022, entry.name
    assert {"usr/bin/kata-pin", "usr/bin/python3", "etc/passwd"} <= names
    assert len([name for name in names if name.startswith("usr/bin/")]) == 3
    assert not {name for name in names if name.endswith(("/sh", "/legacy.pyc"))}
    assert config["config"]["Entrypoint"] == ["/usr/bin/kata-pin"]
    document = bill(path)
    assert document["metadata"]["component"]["hashes"][0]["content"] == archive[0].split(":")[1]
    found = {one["purl"].partition("?")[0]: one for one in document["components"]}
    lock = (ROOT / "requirements.lock").read_text()
    for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE):
        if name not in UNUSED:
            assert found[f"pkg:pypi/{name}@{version}"]["hashes"][0]["content"] in lock
    urls = [unquote(url) for url in found if url.startswith("pkg:deb/debian/")]
    debian = {url.split("/")[2].partition("@")[0] for url in urls}
    assert {"libc6", "libstdc++6", "python3.13-minimal"} <= debian
    assert {f"usr/share/doc/{name}/copyright" for name in debian} <= names


def read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def blob(archive: tarfile.TarFile, descriptor: Json) -> bytes:
    algorithm, digest = descriptor["digest"].split(":")
    data = read(archive, f"blobs/{algorithm}/{digest}")
    assert (len(data), hashlib.sha256(data).hexdigest()) == (descriptor["size"], digest)
    return data


def rows(document: Json, check: str) -> list[Json]:
    return [row for row in document["rows"] if row["check"] == check]
