"""Driving minikata (tests/e2e/minikata) directly, as containerd's runc shim would.

    with minikata_node(folder, dirs, default_vcpus=2) as kata:
        with kata.container("p1", "p1") as pod, kata.container("c1", "p1", cpus="1") as app:
            app.start()

Everything is below `folder` and is purged at the end: processes by pid, cgroups by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import qemu
from tests.support.katalike import KataDirs
from tests.support.ocirun import OciContainer
from tests.support.waiting import SCALE

PROGRAM = Path(__file__).resolve().parents[1] / "e2e/minikata/minikata"

_KVM_RUN = "0xae80"


class MinikataContainer(OciContainer):
    """A container under minikata; bundles are where containerd has them."""

    def __init__(self, kata: Minikata, name: str, **options: Any) -> None:
        self._kata = kata
        super().__init__("minikata", kata.dirs.bundles, name, **options)

    def update_resources(self, cpu: Mapping[str, Any]) -> None:
        """Change CPU resources with a document, as containerd does."""
        document = self._kata.folder / "resources.json"
        document.write_text(json.dumps({"cpu": dict(cpu)}))
        self._run("update", "--resources", str(document), self.name)

    @property
    def state(self) -> str:
        """What `state` prints."""
        done = subprocess.run(
            self._command("state", self.name), capture_output=True, check=True, timeout=30 * SCALE
        )
        return done.stdout.decode()

    def kill(self) -> None:
        """End the container's process; the container stays until it is deleted."""
        self._run("kill", self.name, "KILL")

    def delete(self) -> None:
        """Delete the stopped container."""
        self._run("delete", self.name)

    def _command(self, *arguments: str) -> list[str]:
        return self._kata.command(*arguments)


class Minikata:
    """One minikata root with settings of its own."""

    def __init__(self, folder: Path, dirs: KataDirs, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.dirs = dirs
        self.root = folder / "mk"
        self.cgroup = f"/kata-pin-test-{os.getpid()}"
        self._config = folder / "minikata.json"
        places = {"vc": str(dirs.vc), "kata": str(dirs.kata), "shared": str(dirs.shared)}
        self._config.write_text(json.dumps({**places, **qemu.minikata_settings(), **settings}))

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of minikata."""
        return [str(PROGRAM), "--root", str(self.root), "--config", str(self._config), *arguments]

    def container(
        self,
        name: str,
        sandbox: str,
        *,
        hooks: Mapping[str, Any] | None = None,
        annotations: Mapping[str, str] | None = None,
        netns: str = "",
        **cpu: Any,
    ) -> MinikataContainer:
        """Return a container to be created; `cpu` is the `cpu` object of its resources.

        The sandbox's own container is the one with its name.
        """
        kind = "sandbox" if name == sandbox else "container"
        linux: dict[str, Any] = {"cgroupsPath": f"{self.cgroup}/{name}", "resources": {"cpu": cpu}}
        linux["namespaces"] = [{"type": "network", "path": netns}] if netns else []
        return MinikataContainer(
            self,
            name,
            hooks=hooks or {},
            annotations={
                "io.kubernetes.cri.container-type": kind,
                "io.kubernetes.cri.sandbox-id": sandbox,
                **(annotations or {}),
            },
            linux=linux,
        )

    def log(self, sandbox: str) -> str:
        """Return what the sandbox's service has said."""
        return (self.root / ".log" / sandbox).read_text()

    def persist(self, sandbox: str) -> dict[str, Any]:
        """Return persist.json."""
        text = (self.dirs.vc / "sbs" / sandbox / "persist.json").read_text()
        document: dict[str, Any] = json.loads(text)
        return document

    def qemu_pid(self, sandbox: str) -> int:
        """Return the pid of a sandbox's QEMU, from its pid file."""
        return int((self.dirs.vc / "vm" / sandbox / "pid").read_text())

    def processes(self) -> list[int]:
        """Return every service, virtiofsd, QEMU and placeholder that was started here."""
        lines = (self.root / ".pids").read_text().splitlines()
        return [int(line.split()[0]) for line in lines]

    def purge(self) -> None:
        """End and remove whatever is left."""
        subprocess.run(self.command("purge"), check=True, timeout=30 * SCALE)


def vcpu_threads(pid: int) -> dict[int, int]:
    """Return thread by KVM vCPU id: each is inside ioctl(KVM_RUN) on its own descriptor."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            words = _system_call(task)
            if (task / "comm").read_text().startswith("qemu") and words[2:3] == [_KVM_RUN]:
                target = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
                found[int(target.rpartition(":")[2])] = int(task.name)
    return found


def _system_call(task: Path) -> Sequence[str]:
    for _ in range(100):
        words = (task / "syscall").read_text().split()
        if words != ["running"]:
            return words
    return []


@contextlib.contextmanager
def minikata_node(folder: Path, dirs: KataDirs, **settings: Any) -> Iterator[Minikata]:
    """Make a minikata root below `folder`, purge it at the end; `settings` as in settings.py."""
    kata = Minikata(folder, dirs, settings)
    try:
        yield kata
    finally:
        kata.purge()
