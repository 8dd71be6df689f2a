"""Pods of minikata on this node's own paths, with the hooks that `kata-pin install` wrote.

    with node_pods(node, folder) as kata:
        with kata.container("p1", "p1", hooks=installed_hooks()) as pod: ...

The daemon is the installed one. minikata's root is purged at the end, whatever became of its pods.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.e2e.idlevm import tids, vcpu_tids
from tests.e2e.node import Node
from tests.support.katalike import KataDirs
from tests.support.minikata import Minikata
from tests.support.waiting import SCALE

HOOKS: Final = Path("/etc/kata-pin/containerd-hooks.json")
HERE: Final = KataDirs(
    vc=Path("/run/vc"),
    kata=Path("/run/kata"),
    # Not containerd's own folder: when it starts it removes bundles that it does not know.
    bundles=Path("/run/k3s/containerd/io.containerd.runtime.v2.task/e2e"),
    shared=Path("/run/kata-containers/shared/sandboxes"),
)
EXCLUSIVE: Final[dict[str, Any]] = {"quota": 100_000, "period": 100_000}
"""With a cpuset of one CPU: exclusive, as the kubelet's static policy gives it."""

SHARED: Final[dict[str, Any]] = {"shares": 102}


def installed_hooks() -> dict[str, Any]:
    """Return the `hooks` of config.json as they were installed for containerd.

    But for `timeout`: a start of Python takes 50 times longer here, and seconds on a busy machine.
    """
    found: dict[str, Any] = json.loads(HOOKS.read_text())["hooks"]
    for hooks in found.values():
        for hook in hooks:
            hook["timeout"] = int(hook["timeout"] * SCALE)
    return found


@contextlib.contextmanager
def node_pods(node: Node, folder: Path, **settings: Any) -> Iterator[Minikata]:
    """Make a minikata root in `folder` over the node's own /run/vc; purge it at the end."""
    shutil.rmtree(HERE.bundles, ignore_errors=True)  # of a run that was broken off
    for path in (HERE.vc, HERE.kata, HERE.bundles, HERE.shared):
        path.mkdir(parents=True, exist_ok=True)
    kata = Minikata(folder, HERE, {"scale": node.scale, **settings})
    try:
        yield kata
    finally:
        logs = kata.root / ".log"
        sandboxes = [one.name for one in logs.iterdir()] if logs.exists() else []
        try:
            kata.purge()
        finally:
            for place in (HERE.vc / "vm", HERE.vc / "sbs", HERE.kata, HERE.shared):
                for name in sandboxes:  # those that were not deleted before
                    shutil.rmtree(place / name, ignore_errors=True)
            shutil.rmtree(HERE.bundles)


class VmThreads:
    """The threads of one VM as the kernel has them, found without kata-pin."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def affinities(self) -> dict[int, frozenset[int]]:
        """Return each thread's affinity."""
        found = {}
        for tid in tids(self.pid):
            with contextlib.suppress(ProcessLookupError):
                found[tid] = frozenset(os.sched_getaffinity(tid))
        return found

    def vcpus(self) -> dict[int, int]:
        """Return the thread of each vCPU that lives."""
        alive = tids(self.pid)
        return {vcpu: tid for vcpu, tid in vcpu_tids(self.pid).items() if tid in alive}

    def misplaced(self, pairs: Mapping[int, int], rest: Iterable[int]) -> list[str]:
        """Return a line for each thread that is elsewhere; `pairs` is pCPU by vCPU."""
        vcpus = self.vcpus()
        lines = [f"vCPU {vcpu} has no thread" for vcpu in pairs if vcpu not in vcpus]
        wanted = {vcpus[vcpu]: {cpu} for vcpu, cpu in pairs.items() if vcpu in vcpus}
        other = set(rest)
        for tid, mask in self.affinities().items():
            if mask != wanted.get(tid, other):
                lines.append(f"thread {tid} on {sorted(mask)}, not {wanted.get(tid, other)}")
        return lines
