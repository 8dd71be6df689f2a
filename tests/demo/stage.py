"""The demo's stage: private directories, the daemon, sandboxes and their containers.

Everything real: `kata-pin install` puts the hook below a private root, runc runs it, QEMU is laid
out as Kata lays it out. Everything is ended by close(), also when a step failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.katalike import ContainerSpec, KataDirs, KataSandbox
from tests.support.ocirun import OciContainer
from tests.support.qemu import QEMU, Accelerator, Machine
from tests.support.vmmhost import SHIMS
from tests.support.waiting import SCALE, wait_for

PROGRAM = Path(sys.executable).with_name("kata-pin")
PHASES = ("createRuntime", "poststart", "poststop")
PERIOD_US = 100_000

PATIENCE_S = 10.0 * SCALE
"""Longest wait for one command or hook; scripts/demo stretches it for busy machines."""


class Stage:
    """What the story plays on."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kp-demo-"))
        self.root.chmod(0o755)  # the daemon is not root
        self.dirs = KataDirs.below(self.root)
        self.runtime_dir = self.root / "kata-pin"
        self.cgroup = f"/kata-pin-demo-{os.getpid()}"
        self.debugfs = self._mount_debugfs()
        self.accelerator = accelerator
        self._daemon: subprocess.Popen[bytes] | None = None
        self._closing = contextlib.ExitStack()
        self._config = self._write_config()
        self._hook = self._install_hook()

    # ---- kata-pin ------------------------------------------------------------------------

    def run(self, *arguments: str, expect: int | None = 0) -> str:
        """Run kata-pin and return what it printed; `expect` is the exit status it must have."""
        command = [str(PROGRAM), "--config", str(self._config), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        if expect is not None and done.returncode != expect:
            raise RuntimeError(f"kata-pin {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def show(self, *arguments: str) -> None:
        """Run kata-pin so that the reader sees the command and its output."""
        print(f"$ kata-pin {' '.join(arguments)}\n{self.run(*arguments)}", flush=True)

    def state(self, sandbox_id: str) -> dict[str, Any]:
        """Return what kata-pin says of one sandbox; with state `unknown` if it says nothing."""
        document = json.loads(self.run("show", "--json"))
        unknown = {"id": sandbox_id, "state": "unknown", "threads": []}
        sandboxes = (one for one in document["sandboxes"] if one["id"] == sandbox_id)
        return next(sandboxes, unknown)

    def start_daemon(self) -> None:
        """Start the daemon and wait until it answers."""
        log = (self.root / "daemon.log").open("ab")
        command = [str(PROGRAM), "--config", str(self._config), "run"]
        self._daemon = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        wait_for(self._serves, "the daemon to serve")

    def _serves(self) -> bool:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise RuntimeError(f"the daemon has ended with status {self._daemon.returncode}")
        with socket.socket(socket.AF_UNIX) as peer:
            return peer.connect_ex(str(self.runtime_dir / "control.sock")) == 0

    def kill_daemon(self) -> None:
        """End the daemon with SIGKILL: it cannot tidy up."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait(10)

    @property
    def spooled(self) -> int:
        """How many messages wait in the spool."""
        return len(list((self.runtime_dir / "spool").glob("*.msg")))

    def hold(self) -> None:
        """Keep everything for the user's commands: in a shell, or until SIGINT or SIGTERM."""
        bin_dir = self._write_program()
        if sys.stdin.isatty():
            print("   In this shell kata-pin is the stage's, for example: kata-pin show web")
            print("   `exit` ends the demo.", flush=True)
            path = f"{bin_dir}:{os.environ['PATH']}"
            shell = os.environ.get("SHELL", "/bin/sh")
            subprocess.run([shell], env={**os.environ, "PATH": path}, check=False)
            return
        ending = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        print("   In another terminal kata-pin is the stage's after this command:")
        print(f"   PATH={bin_dir}:$PATH", flush=True)
        signal.sigwait(ending)

    def _write_program(self) -> Path:
        """Write a `kata-pin` that means this stage, and not the machine; return its folder."""
        program = self.root / "bin" / "kata-pin"
        program.parent.mkdir()
        program.write_text(
            "#!/bin/sh\n"
            f'case "$1" in install | uninstall) set -- "$@" --root {self.root / "node"} ;; esac\n'
            f'exec {PROGRAM} "$@" --config {self._config}\n'
        )
        program.chmod(0o755)
        return program.parent

    # ---- Kata and the runtime ------------------------------------------------------------

    def sandbox(self, name: str) -> KataSandbox:
        """Create a pod's sandbox: QEMU first, then the sandbox container with its hooks.

        As Kata's Go shim does, the stand-in holds qmp.sock but for the time of the hooks.
        """
        iothreads = ("iothread-93faf1dd31a4eabb", "iothread-0a1b2c3d4e5f6071")
        machine = Machine(boot=2, maximum=8, iothreads=iothreads)
        made = KataSandbox(self.dirs, name, machine=machine, accelerator=self.accelerator)
        kata = self._closing.enter_context(made)
        kata.shim.let_go()
        self._container(name, name, {}, kind="sandbox", cgroup=f"pod-{name}/pause")
        kata.shim.hold()
        return kata

    def container(
        self, kata: KataSandbox, name: str, cpus: str, *, exclusive: bool
    ) -> OciContainer:
        """Create and start a container in a sandbox, with the resources the kubelet would give."""
        count = len(cpus.split(","))
        quota = {"quota": count * PERIOD_US, "period": PERIOD_US} if exclusive else {"shares": 102}
        qos = "" if exclusive else "burstable/"
        path = f"{qos}pod-{kata.id}/{name}"
        made = self._container(name, kata.id, {"cpus": cpus, **quota}, cgroup=path)
        kata.write_persist([*kata.containers, _persisted(name, cpus, exclusive=exclusive)])
        return made

    def update(self, kata: KataSandbox, container: OciContainer, cpus: str) -> None:
        """Change a container's cpuset as the kubelet does: no hook, Kata rewrites its state."""
        container.update(cpus)
        others = [one for one in kata.containers if one.id != container.name]
        kata.write_persist([*others, _persisted(container.name, cpus, exclusive=False)])

    def _container(
        self,
        name: str,
        sandbox_id: str,
        cpu: Mapping[str, Any],
        *,
        kind: str = "container",
        cgroup: str,
    ) -> OciContainer:
        container = OciContainer(
            "runc",
            self.dirs.bundles,
            name,
            hooks=self._hooks(),
            annotations={
                "io.kubernetes.cri.container-type": kind,
                "io.kubernetes.cri.sandbox-id": sandbox_id,
                "io.kubernetes.cri.container-name": "" if kind == "sandbox" else name,
                "io.kubernetes.cri.sandbox-name": sandbox_id,
                "io.kubernetes.cri.sandbox-namespace": "shop",
            },
            linux={"cgroupsPath": f"{self.cgroup}/{cgroup}", "resources": {"cpu": dict(cpu)}},
        )
        self._closing.enter_context(container)
        container.start()
        return container

    def _hooks(self) -> dict[str, Any]:
        budget = f"{PATIENCE_S * 1000:.0f}"  # on a node it is 200 ms; here no pod waits
        arguments = [
            f"--runtime-dir={self.runtime_dir}",
            f"--pin-ms={budget}",
            f"--record-ms={budget}",
        ]
        return {
            phase: [{"path": self._hook, "args": ["kata-pin-hook", phase, *arguments]}]
            for phase in PHASES
        }

    # ---- setting up and tidying up -------------------------------------------------------

    def _write_config(self) -> Path:
        settings = {
            "version": 1,
            "runtime_dir": str(self.runtime_dir),
            "audit": {"affinity_s": 0.5, "deep_s": 1},
            "shims": [*SHIMS],
            "hypervisors": [QEMU],
            "paths": {
                "vc": str(self.dirs.vc),
                "kata": str(self.dirs.kata),
                "bundle_roots": [str(self.dirs.bundles)],
                "debugfs": str(self.root / "debug"),
            },
        }
        path = self.root / "config.yaml"
        path.write_text(json.dumps(settings))
        return path

    def _install_hook(self) -> str:
        """Install kata-pin below a private root; return where its hook is."""
        node = self.root / "node"
        self.run("install", "--root", str(node), "--containerd")
        return str(next(node.rglob("kata-pin-hook")))

    def _mount_debugfs(self) -> bool:
        where = self.root / "debug"
        where.mkdir()
        command = ["mount", "-t", "debugfs", "none", str(where)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def close(self) -> list[str]:
        """End everything and remove it; return what could not be removed."""
        with contextlib.suppress(Exception):
            self._closing.close()
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(10)
        if self.debugfs:
            subprocess.run(["umount", str(self.root / "debug")], check=False)
        left = self._remove_cgroups()
        shutil.rmtree(self.root, ignore_errors=True)
        return left + ([str(self.root)] if self.root.exists() else [])

    def _remove_cgroups(self) -> list[str]:
        """Remove the empty cgroups that runc leaves for the pods."""
        left = []
        for top in Path("/sys/fs/cgroup").glob(f"**{self.cgroup}"):
            folders = sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True)
            for folder in [*folders, top]:
                try:
                    folder.rmdir()
                except OSError:
                    left.append(str(folder))
        return left


def _persisted(name: str, cpus: str, *, exclusive: bool) -> ContainerSpec:
    quota = len(cpus.split(",")) * PERIOD_US if exclusive else None
    return ContainerSpec(name, cpus=cpus, quota=quota)


def elapsed(since: float) -> str:
    """Return a duration for a person."""
    return f"{time.monotonic() - since:.1f} s"
