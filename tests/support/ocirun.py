"""Containers under a real OCI runtime (runc, crun), whose hooks are the installed ones.

    with OciContainer("runc", folder, "c1", hooks=hooks) as container:
        container.start()

The root file system is the host's /usr, read-only; the workload sleeps. Needs root. Every container
is killed and deleted at the end; state and bundle are below `folder`, which the caller removes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import SCALE, wait_for

RUNTIMES = ("runc", "crun")


def available(runtime: str) -> bool:
    """Whether the runtime is installed."""
    return shutil.which(runtime) is not None


def in_private_namespace(command: Sequence[str]) -> list[str]:
    """Return the command without the mixed cgroup hierarchy that crun refuses to work on."""
    script = '! mountpoint -q "$0" || umount "$0"; exec "$@"'
    unshare = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
    return [*unshare, "/sys/fs/cgroup/unified", *command]


class OciError(Exception):
    """The runtime failed; the text is what it said."""


class OciContainer:
    """One container from create to delete; `hooks` is the `hooks` object of its config.json."""

    def __init__(
        self,
        runtime: str,
        folder: Path,
        name: str,
        *,
        hooks: Mapping[str, Any],
        annotations: Mapping[str, str] | None = None,
        linux: Mapping[str, Any] | None = None,
    ) -> None:
        """`linux` adds to config.json's `linux`: resources, cgroupsPath."""
        self.name = name
        self.bundle = folder / name
        self._runtime = runtime
        self._state = folder / f"{runtime}-state"
        self._log = folder / f"{name}.log"
        self.bundle.mkdir(exist_ok=True)  # Kata's shim may have made it
        make_rootfs(self.bundle / "rootfs")
        config = _config(hooks, annotations or {}, linux or {})
        (self.bundle / "config.json").write_text(json.dumps(config))

    def __enter__(self) -> Self:
        # The workload keeps what create got as stdout and stderr: a file, or we would wait for it.
        with self._log.open("wb") as log:
            done = self._call("create", "--bundle", str(self.bundle), self.name, output=log)
        if done:
            raise OciError(self._log.read_text())
        return self

    def start(self) -> None:
        """Start the workload."""
        self._run("start", self.name)

    def update(self, cpus: str) -> None:
        """Change the container's cpuset, as a kubelet does; no hook runs on it."""
        self._run("update", "--cpuset-cpus", cpus, self.name)

    def stop(self) -> None:
        """Kill the workload and delete the container."""
        self._run("kill", self.name, "KILL")
        wait_for(lambda: self.status == "stopped", f"{self.name} to stop")
        self._run("delete", self.name)

    @property
    def status(self) -> str:
        """The runtime's word for where the container is; empty when it knows none such."""
        done = subprocess.run(
            self._command("state", self.name), capture_output=True, check=False, timeout=20 * SCALE
        )
        return "" if done.returncode else str(json.loads(done.stdout)["status"])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status:
            self._run("delete", "--force", self.name)

    def _run(self, *arguments: str) -> None:
        with self._log.open("ab") as log:
            if self._call(*arguments, output=log):
                raise OciError(self._log.read_text())

    def _call(self, *arguments: str, output: Any) -> int:
        return subprocess.run(
            self._command(*arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            check=False, timeout=30 * SCALE,
        ).returncode  # fmt: skip

    def _command(self, *arguments: str) -> list[str]:
        command = [self._runtime, "--root", str(self._state), *arguments]
        return in_private_namespace(command) if self._runtime == "crun" else command


def make_rootfs(path: Path) -> None:
    """Make a root file system that takes everything from the host's /usr, mounted into it."""
    for folder in ("usr", "proc", "dev", "tmp", "etc", "run", "sys"):
        (path / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (path / link).symlink_to(f"usr/{link}")


def _config(
    hooks: Mapping[str, Any], annotations: Mapping[str, str], linux: Mapping[str, Any]
) -> dict[str, Any]:
    namespaces = [{"type": "pid"}, {"type": "mount"}, {"type": "network"}]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "args": ["/usr/bin/sleep", "infinity"],
            "cwd": "/",
            "env": ["PATH=/usr/bin"],
            "user": {"uid": 0, "gid": 0},
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
        ],
        "linux": {"namespaces": namespaces, **linux},
        "annotations": dict(annotations),
        "hooks": dict(hooks),
    }
