"""Many sandboxes of minikata on this node, cheap to command: through a nursery of forks.

    with fleet(node, folder) as made:
        pod = made.create("f01", "f01"); made.create("c1", "f01", cpus="0-1", shares=102)

What is known of each container is kept here, beside kata-pin: the test's own idea of the truth.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.e2e.minikata import client
from tests.e2e.node import Node
from tests.e2e.nodepods import HERE, installed_hooks, node_pods
from tests.support.minikata import Minikata

_NURSERY: Final = Path(client.__file__).with_name("nursery.py")


class CommandError(Exception):
    """A command of minikata failed; the text is what it said."""


class Fleet:
    """Runs minikata's commands; safe to call from several threads."""

    def __init__(self, node: Node, kata: Minikata, folder: Path) -> None:
        self._node = node
        self._kata = kata
        self._socket = folder / "nursery"
        self._log = folder / "nursery.log"
        self._hooks = installed_hooks()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the nursery under the name of Kata's shim."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [client.SHIM, "-IS", str(_NURSERY), str(self._socket)],
                executable=client.interpreter(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._node.wait(self._socket.exists, "the nursery to listen", seconds=30)

    def stop(self) -> None:
        """End the nursery; the sandboxes live on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def create(self, name: str, sandbox: str, **cpu: Any) -> None:
        """Create and start a container with a `cpu` object; the sandbox's is that of its name."""
        bundle = HERE.bundles / name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._config(name, sandbox, cpu)))
        self.call("create", "--bundle", str(bundle), name)
        self.call("start", name)

    def update(self, name: str, **cpu: Any) -> None:
        """Change a container's resources."""
        document = HERE.bundles / name / "resources.json"
        document.write_text(json.dumps({"cpu": cpu}))
        self.call("update", "--resources", str(document), name)

    def delete(self, name: str) -> None:
        """Kill and delete a container."""
        self.call("delete", "--force", name)
        shutil.rmtree(HERE.bundles / name)

    def qemu_pid(self, sandbox: str) -> int:
        """Return the pid of a sandbox's QEMU."""
        return self._kata.qemu_pid(sandbox)

    def call(self, *arguments: str) -> str:
        """Run a command; return its output, raise CommandError with it."""
        words = self._kata.command(*arguments)[1:]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60 * self._node.scale)
            connection.connect(str(self._socket))
            connection.sendall("\0".join(words).encode())
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        status, _, text = answer.partition("\0")
        if status != "0":
            raise CommandError(f"{' '.join(arguments)}: {status or 'nothing'} {text}")
        return text

    def _config(self, name: str, sandbox: str, cpu: dict[str, Any]) -> dict[str, Any]:
        return {
            "ociVersion": "1.0.2",
            "annotations": {
                "io.kubernetes.cri.container-type": "sandbox" if name == sandbox else "container",
                "io.kubernetes.cri.sandbox-id": sandbox,
            },
            "hooks": self._hooks,
            "linux": {
                "cgroupsPath": f"{self._kata.cgroup}/{name}",
                "resources": {"cpu": cpu},
            },
        }


@contextlib.contextmanager
def fleet(node: Node, folder: Path, **settings: Any) -> Iterator[Fleet]:
    """Make a fleet; `settings` are minikata's. Everything is ended and removed at the end."""
    with node_pods(node, folder, **settings) as kata:
        made = Fleet(node, kata, folder)
        try:
            made.start()
            yield made
        finally:
            made.stop()


def vhost_threads() -> dict[int, set[int]]:
    """Return the vhost workers that are kernel threads, by the pid of their QEMU.

    So it is on Linux 6.1; later they are threads of QEMU itself.
    """
    found: dict[int, set[int]] = {}
    for child in Path("/proc/2/task/2/children").read_text().split():
        with contextlib.suppress(OSError):
            name, _, pid = Path(f"/proc/{child}/comm").read_text().strip().partition("-")
            if name == "vhost":
                found.setdefault(int(pid), set()).add(int(child))
    return found


def affinities(tids: set[int]) -> dict[int, frozenset[int]]:
    """Return the affinity of each thread that lives."""
    found = {}
    for tid in tids:
        with contextlib.suppress(ProcessLookupError):
            found[tid] = frozenset(os.sched_getaffinity(tid))
    return found
