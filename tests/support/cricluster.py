"""A private node and a private containerd, with NRI between them and pods made through CRI.

Hooks are not installed and audits do not run unless a test wants them: what the daemon knows, it
knows from NRI. The runtime handler `kata` is minikata, the default one is runc.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from tests.support.containerd import Containerd
from tests.support.daemon import Json, Node
from tests.support.waiting import wait_for


class Cluster:
    """A node and its containerd."""

    def __init__(self, node: Node, containerd: Containerd, **settings: Any) -> None:
        self.node = node
        self.containerd = containerd
        self.cri = containerd.cri
        node.configure(
            hypervisors=[containerd.qemu],
            nri={"enabled": "yes", "socket": str(containerd.nri_socket)},
            **settings,
        )

    def start(self) -> None:
        """Start the daemon and wait until NRI has told it everything."""
        told = self.told
        self.node.start()
        self.wait_told(told)

    @property
    def told(self) -> int:
        """How often a Synchronize has been taken in."""
        return (
            self.node.log.count("NRI: containerd")
            if (self.node.root / "daemon.log").exists()
            else 0
        )

    def wait_told(self, before: int) -> None:
        """Wait for another Synchronize."""
        try:
            wait_for(lambda: self.told > before, "NRI to synchronize", 20)
        except TimeoutError as error:
            error.add_note(self.node.log[-3000:] + self.containerd.log[-3000:])
            raise

    def run(self, pod: str, name: str, **resources: Any) -> str:
        """Create and start a container of a pod."""
        container = self.cri.create(pod, name, pod_name="p1", **resources)
        self.cri.start(container)
        return container

    def shown(self, pod: str) -> Json | None:
        """Return what the daemon shows of a pod."""
        for one in self.node.ask("state")["sandboxes"]:
            if one["id"] == pod:
                return dict(one)
        return None

    def misplaced(self, pod: str, cpus: set[int]) -> list[str]:
        """Return a line for each thread of a pod's QEMU that is elsewhere."""
        pid = int((self.node.dirs.vc / "vm" / pod / "pid").read_text())
        lines = []
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                affinity = os.sched_getaffinity(int(name))
                if affinity != cpus:
                    lines.append(f"thread {name} on {affinity}, not {cpus}")
        return lines

    def wait_placed(self, pod: str, cpus: set[int]) -> None:
        """Wait until every thread of a pod's QEMU is there."""
        try:
            wait_for(lambda: not self.misplaced(pod, cpus), "pins to stand")
        except TimeoutError as error:
            error.add_note("\n".join([*self.misplaced(pod, cpus), self.node.log[-4000:]]))
            raise

    def forget_files(self, pod: str) -> None:
        """Remove what Kata keeps of containers: nobody but NRI can tell of them now."""
        for path in (self.node.dirs.vc / "sbs" / pod).rglob("persist.json"):
            path.unlink()
