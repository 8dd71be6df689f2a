"""The real containerd with NRI, out of a Debian 13 root, on a private piece of this machine.

    with private_containerd(folder, node.dirs) as containerd:
        pod = containerd.cri.run_pod("p1", "kata")

A process of its own holds a mount namespace in which the root is overlaid; containerd and all that
it starts are chrooted there. Pids, /sys and /dev are this machine's. `folder` has the same path
inside and outside. At the end every process in the namespace is ended, by pid, then the cgroups
are removed. Runtime handlers: the default is runc; `kata` is minikata (tests/e2e/minikata).
There are two releases: Debian 13's, and the newer one that scripts/containerd builds, or another
that it has built: KATA_PIN_CONTAINERD=2.1.9 is for runs by hand. A lab machine (Debian 13) is such
a root itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.node import VARIABLE as LAB
from tests.lab.rootfs import root_builder
from tests.support import qemu
from tests.support.cri import Cri
from tests.support.katalike import KataDirs
from tests.support.pauseimage import IMAGE, pause_archive
from tests.support.waiting import SCALE, wait_for

PROJECT = Path(__file__).resolve().parents[2]
START_S = 30.0


@dataclass(frozen=True)
class Release:
    """A containerd: `programs` is the folder that has it, empty for that of the Debian root."""

    name: str
    programs: str = ""


WANTED: Final = os.environ.get("KATA_PIN_CONTAINERD", "")
"""What runs where a test does not choose, by hand: 2.4, or a release that was built."""


def _built() -> Release:
    """Return the one that scripts/containerd builds, built or not."""
    other = [WANTED] if WANTED.count(".") > 1 else []
    command = [str(PROJECT / "scripts" / "containerd"), *other, "--where"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Release(WANTED or "2.4", done.stdout.strip())


DEBIANS: Final = Release("1.7")
BUILT: Final = _built()

RELEASES: Final = (
    pytest.param(DEBIANS, id=DEBIANS.name),
    pytest.param(
        BUILT,
        id=BUILT.name,
        marks=pytest.mark.skipif(
            not Path(BUILT.programs, "containerd").exists(),
            reason="no newer containerd here: scripts/containerd builds it (once, a minute or two)",
        ),
    ),
)
"""What a fixture `release` is given, for tests that run with each."""

CHOSEN: Final = BUILT if WANTED else DEBIANS

only_debians = pytest.mark.parametrize("release", RELEASES[:1], indirect=True)
only_built = pytest.mark.parametrize("release", RELEASES[1:], indirect=True)

_CONFIG = """
version = 2
root = "{folder}/root"
state = "/run/containerd"
[timeouts]
  # a shim that answers late is taken for dead
  "io.containerd.timeout.shim.load" = "{shim_s:g}s"
  "io.containerd.timeout.shim.cleanup" = "{shim_s:g}s"
  "io.containerd.timeout.shim.shutdown" = "{shim_s:g}s"
  "io.containerd.timeout.task.state" = "{shim_s:g}s"
[grpc]
  address = "{folder}/c.sock"
[plugins."io.containerd.nri.v1.nri"]
  disable = false
  socket_path = "{folder}/nri.sock"
  plugin_path = "{folder}/no-plugins"
  plugin_registration_timeout = "{registration_s:g}s"
  plugin_request_timeout = "{request_timeout}"
[plugins."io.containerd.service.v1.tasks-service"]
  blockio_config_file = "{folder}/blockio.yaml"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}/cni"
    conf_dir = "{folder}/cni/conf"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata]
    runtime_type = "io.containerd.runc.v2"
    pod_annotations = ["minikata.*", "io.katacontainers.*"]
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata.options]
      BinaryName = "{project}/tests/e2e/minikata/minikata"
      Root = "{folder}/mk"
"""

KATAS_QEMU: Final = "/opt/kata/bin/qemu-system-x86_64"
"""Where kata-deploy puts it; in a place that is pivoted."""

_BLOCKIO = """
Classes:
  slow:
    - Devices: [/dev/loop0]
      ThrottleReadBps: 1M
"""
"""The block-I/O classes that this containerd knows."""

_MOUNTS = """
set -e
mount -t tmpfs tmpfs "$2/layer"  # not on the disk of the root, which a lab machine's is
cp -a "$2/upper" "$2/layer"
mkdir "$2/layer/work"
mount -t overlay overlay -o lowerdir="$1",upperdir="$2/layer/upper",workdir="$2/layer/work" "$2/mnt"
for one in proc sys dev; do mount --rbind "/$one" "$2/mnt/$one"; done
mount -t tmpfs tmpfs "$2/mnt/run"
mnt="$2/mnt"; shift 2
while [ $# -gt 0 ]; do
    [ -e "$mnt$2" ] || mkdir -p "$mnt$2"
    mount --bind "$1" "$mnt$2"
    shift 2
done
if [ "$PIVOT" ]; then
    cd "$mnt"
    mkdir -p former
    pivot_root . former
    umount -l /former
    mount --make-rshared /
fi
echo ready
exec sleep infinity
"""


def debian_root() -> Path | None:
    """Return the Debian 13 root, None where there is none."""
    return Path("/") if LAB in os.environ else root_builder(lambda _: None).find_root()


def why_not() -> str:
    """Return why containerd cannot be had here, empty if it can."""
    if os.geteuid() != 0:
        return "needs root: mounts and containers"
    if debian_root() is None:
        return "no Debian 13 root: scripts/debian-root builds one (once, some minutes)"
    return ""


PEERS: Final = [
    pytest.param(
        *release.values,
        id=f"containerd {release.id}",
        marks=[
            *release.marks,
            *(pytest.mark.peer, pytest.mark.root, pytest.mark.oci),
            pytest.mark.skipif(why_not() != "", reason=why_not()),
        ],
    )
    for release in RELEASES
]
"""RELEASES, for tests of tests/contract that run over a double too."""


class Containerd:
    """One containerd and its place; `shared` is the folder seen from both sides."""

    def __init__(
        self,
        folder: Path,
        dirs: KataDirs,
        *,
        release: Release = CHOSEN,
        request_timeout: str = f"{2 * SCALE:g}s",
        pivot: bool = False,
    ) -> None:
        self._release = release
        self._pivot = pivot
        self._folder = folder
        self._dirs = dirs
        self.shared = folder / "shared"
        self.nri_socket = self.shared / "nri.sock"
        self._request_timeout = request_timeout
        self._holder: subprocess.Popen[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._cri: Cri | None = None
        self.cgroup = f"/kata-pin-cri-{os.getpid()}-{folder.name}"

    @property
    def cri(self) -> Cri:
        """The client."""
        assert self._cri is not None, "not started"
        return self._cri

    @property
    def cri_socket(self) -> Path:
        """Where it serves CRI."""
        return self.shared / "c.sock"

    @property
    def qemu(self) -> str:
        """QEMU's path as this machine sees it, for the daemon's list of hypervisors."""
        if self._pivot:
            return KATAS_QEMU
        return f"{self._folder}/mnt/usr/bin/qemu-system-x86_64"

    @property
    def log(self) -> str:
        """What containerd has said."""
        return (self._folder / "containerd.log").read_text(errors="replace")

    def prepare(self, minikata: Mapping[str, Any]) -> None:
        """Make the place: mounts, configuration, image; `minikata` differs from its defaults."""
        tree = debian_root()
        assert tree is not None, why_not()
        for name in ("upper/etc", "layer", "mnt", "shared/mk"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "upper/etc/resolv.conf").touch()
        hypervisor = {"hypervisor": KATAS_QEMU} if self._pivot else {}
        (self._folder / "upper/etc/minikata.json").write_text(
            json.dumps(_minikata_settings() | hypervisor | dict(minikata))
        )
        (self.shared / "pause.tar").write_bytes(pause_archive(tree / "bin/busybox"))
        (self.shared / "config.toml").write_text(
            _CONFIG.format(
                folder=self.shared,
                image=IMAGE,
                project=PROJECT,
                request_timeout=self._request_timeout,
                registration_s=5 * SCALE,
                shim_s=10 * SCALE,
            )
        )
        (self.shared / "blockio.yaml").write_text(_BLOCKIO)
        if self._release.programs:
            shutil.copytree(self._release.programs, self.shared / "bin")
        # The daemon compares a VMM's executable with this machine's file of the same path.
        qemu_file = tree / "usr/bin/qemu-system-x86_64"
        if self._pivot:
            made = self._folder / "upper" / KATAS_QEMU.lstrip("/")
            made.parent.mkdir(parents=True)
            made.touch()
        else:
            Path(self.qemu).parent.mkdir(parents=True)
            Path(self.qemu).symlink_to(qemu_file)
        binds = {
            qemu_file: KATAS_QEMU if self._pivot else "/usr/bin/qemu-system-x86_64",
            tree / "usr/share/qemu": "/opt/kata/share/qemu",
            self.shared: str(self.shared),
            PROJECT: str(PROJECT),
            Path(sysconfig.get_path("stdlib")): sysconfig.get_path("stdlib"),
            self._dirs.vc: "/run/vc",
            self._dirs.kata: "/run/kata",
            self._dirs.shared: "/run/kata-containers/shared/sandboxes",
        }
        places = [text for source, target in binds.items() for text in (str(source), target)]
        self._holder = subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNTS, "sh"),
                *(str(tree), str(self._folder), *places),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PIVOT": "yes" if self._pivot else ""},
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "the place could not be mounted"

    def link_config(self) -> None:
        """Make its configuration the one that programs in the place look for."""
        self.run("ln", "-sf", str(self.shared / "config.toml"), "/etc/containerd/config.toml")

    @property
    def place(self) -> str:
        """Its root file system, in the mount namespace of `entered`."""
        return "/" if self._pivot else str(self._folder / "mnt")

    @property
    def path(self) -> str:
        """The folders of programs in the place."""
        return f"{self.shared}/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def entered(self) -> list[str]:
        """Return the command that enters the mount namespace, in which `place` is."""
        assert self._holder is not None, "not prepared"
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"]

    def has(self, path: str) -> bool:
        """Whether a file is in the place."""
        done = subprocess.run(
            self.inside("test", "-e", f"/{path}"), check=False, timeout=60 * SCALE
        )
        return done.returncode == 0

    def dump(self) -> str:
        """Return the configuration as containerd reads it."""
        return self.run(*self._program(), "-c", str(self.shared / "config.toml"), "config", "dump")

    def migrate(self) -> None:
        """Make its configuration file one of its newest version, whole."""
        config = self.shared / "config.toml"
        text = self.run(*self._program(), "-c", str(config), "config", "migrate")
        config.write_text(text)

    def start(self, seconds: float = START_S) -> None:
        """Start containerd and wait until it serves."""
        with (self._folder / "containerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.inside(*self._program(), "-c", str(self.shared / "config.toml")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        socket = self.shared / "c.sock"
        self._cri = Cri(socket, IMAGE, self.cgroup)
        wait_for(lambda: socket.exists() and self.cri.answers(), "containerd to serve", seconds)

    def import_image(self, archive: str = "pause.tar") -> None:
        """Import an image of the shared folder, once."""
        self.run(
            *("ctr", "--address", str(self.shared / "c.sock"), "--namespace", "k8s.io"),
            *("images", "import", "--snapshotter", "native", str(self.shared / archive)),
        )

    def stop(self) -> None:
        """End containerd; its shims and containers live on."""
        assert self._process is not None, "not started"
        self.cri.close()
        self._process.terminate()
        self._process.wait(20 * SCALE)

    def restart(self) -> None:
        """End containerd and start it again, as an upgrade does."""
        self.stop()
        self.start()

    def run(self, *argv: str) -> str:
        """Run a command in the place; return its output."""
        done = subprocess.run(
            self.inside(*argv), capture_output=True, text=True, check=False, timeout=60 * SCALE
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def spec(self, container: str) -> dict[str, Any]:
        """Return the OCI runtime spec of a container."""
        info = self.run(
            *("ctr", "--address", str(self.shared / "c.sock"), "--namespace", "k8s.io"),
            *("containers", "info", container),
        )
        return dict(json.loads(info)["Spec"])

    def end(self) -> None:
        """End every process of the place and remove its cgroups."""
        if self._cri is not None:
            self._cri.close()
        if self._holder is None:
            return
        deadline = time.monotonic() + 20 * SCALE
        while others := self._processes():
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._process is not None:
                self._process.poll()
            assert time.monotonic() < deadline, f"processes {others} do not end"
            time.sleep(0.02)
        self._holder.kill()
        self._holder.wait(10)
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        if self._process is not None:
            self._process.wait(10)
        self._remove_cgroups()

    def _program(self) -> list[str]:
        if not self._release.programs:
            return ["/usr/bin/containerd"]
        path = f"{self.shared}/bin:{os.environ['PATH']}"
        return ["/usr/bin/env", f"PATH={path}", f"{self.shared}/bin/containerd"]

    def inside(self, *argv: str) -> list[str]:
        return [*self.entered(), "chroot", self.place, *argv]

    def _processes(self) -> set[int]:
        """Return all but the holder: those in its mount namespace, and those of runc's pods."""
        assert self._holder is not None, "not prepared"
        space = os.readlink(f"/proc/{self._holder.pid}/ns/mnt")
        found: set[int] = set()
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/mnt") == space:
                        found.add(int(name))
        for tree in self._cgroups():
            for folder, _, _ in os.walk(tree):  # unlike rglob it leaves out what vanishes meanwhile
                with contextlib.suppress(OSError):
                    procs = Path(folder, "cgroup.procs").read_text()
                    found |= {int(line) for line in procs.split()}
        return found - {self._holder.pid}

    def _cgroups(self) -> list[Path]:
        """Return our cgroup in every hierarchy; version 2 has one."""
        mount, name = Path("/sys/fs/cgroup"), self.cgroup.lstrip("/")
        return [*mount.glob(f"*/{name}"), *mount.glob(name)]

    def _remove_cgroups(self) -> None:
        for tree in self._cgroups():
            self._remove_cgroup(tree)
        for path in self._noted_cgroups():
            with contextlib.suppress(OSError):
                path.rmdir()

    def _noted_cgroups(self) -> list[Path]:
        """Return the cgroups that minikata made, the deepest first."""
        found: set[Path] = set()
        for ledger in self.shared.glob("mk/**/cgroups"):
            found |= {Path(line) for line in ledger.read_text().splitlines()}
        return sorted(found, key=lambda path: -len(path.parts))

    def _remove_cgroup(self, top: Path) -> None:
        for folder, _, _ in os.walk(top, topdown=False):
            wait_for(lambda: _rmdir(folder), f"cgroup {folder} to be empty")  # noqa: B023


def _minikata_settings() -> dict[str, Any]:
    """Return what makes a pod cheap: an idle VM without devices."""
    return {
        **qemu.minikata_settings(),
        "virtiofsd": False,
        "network": False,
        "vsock": False,
        "default_memory": 64,
        "scale": SCALE,
    }


def _rmdir(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def private_containerd(
    folder: Path,
    dirs: KataDirs,
    *,
    release: Release = CHOSEN,
    request_timeout: str = f"{2 * SCALE:g}s",
    pivot: bool = False,
    **minikata: Any,
) -> Iterator[Containerd]:
    """Make a place below `folder`, start containerd in it, and remove it all at the end.

    With `pivot` the place is the root of its mount namespace, as on a node, and not a chroot: so
    runc's exec works, and Kata's QEMU is where kata-deploy puts it.
    """
    containerd = Containerd(
        folder, dirs, release=release, request_timeout=request_timeout, pivot=pivot
    )
    try:
        containerd.prepare(minikata)
        containerd.start()
        containerd.import_image()
        yield containerd
    finally:
        containerd.end()
