"""`doctor` on the kubelet: its checkpoint, and whether its own list says the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from kata_pin.cli.reports import words
from kata_pin.config import Config
from kata_pin.errors import KataPinError
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import union
from kata_pin.model.reports.doctor import Row
from kata_pin.sources.kubelet import read_kubelet


def kubelet(config: Config) -> Row:
    """Return the state of the kubelet's checkpoint."""
    path = config.paths.kubelet_state
    try:
        found = read_kubelet(path)
    except KataPinError as error:
        return Row("kubelet", "warn", f"checkpoint not used: {error.message}", error.hint)
    if found is None:
        return Row("kubelet", "info", f"no checkpoint at {path}: exclusive CPUs are inferred")
    held = count(sum(len(containers) for containers in found.entries.values()), "container")
    text = f"policy {found.policy}, default set {found.default}, {held} with exclusive CPUs"
    if found.doubles:
        twice = "; ".join(map(words.double_assignment, found.doubles))
        return Row("kubelet", "warn", f"{text}; {twice}", words.DOUBLE_REMEDY)
    return Row("kubelet", "ok", text)


def pod_resources(config: Config) -> Iterator[Row]:
    """Yield whether the kubelet's own list of exclusive CPUs is that of its checkpoint.

    Nothing where the kubelet has no such socket, or no static policy. Init containers are in the
    checkpoint only.
    """
    from kata_pin.sources.kubelet_api import read_pod_resources

    state = config.paths.kubelet_state
    path = os.path.join(os.path.dirname(state), "pod-resources", "kubelet.sock")
    try:
        known = read_kubelet(state)
        if known is None or known.policy != "static" or not os.path.exists(path):
            return
        listed = asyncio.run(read_pod_resources(path))
    except KataPinError as error:
        yield Row("pod resources", "info", f"not compared: {error.message}", error.hint)
        return
    recorded = {
        (name, cpus) for containers in known.entries.values() for name, cpus in containers.items()
    }
    wrong = [
        f"{container} has {cpus}"
        for container, cpus in sorted(listed.containers.items())
        if (container.rpartition("/")[2], cpus) not in recorded
    ]
    if wrong:
        text = f"the kubelet lists what its checkpoint does not have: {'; '.join(wrong[:3])}"
        remedy = "run doctor again; if it stays, see the kubelet's log"
        yield Row("pod resources", "warn", text, remedy)
        return
    held = union(cpus for _, cpus in recorded)
    free = len(listed.allocatable - held)
    text = f"as the checkpoint; {free} of {len(listed.allocatable)} allocatable pCPUs are free"
    yield Row("pod resources", "ok", text)
