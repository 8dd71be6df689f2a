"""`doctor` on the kubelet: its checkpoint, its own list, and CPUs of DRA claims beside it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from kata_pin.cli.reports import pcpus, words
from kata_pin.config import Config
from kata_pin.errors import KataPinError
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import union
from kata_pin.model.reports.doctor import Row
from kata_pin.sources.claims import read_claims
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


def claims(config: Config) -> Iterator[Row]:
    """Yield what DRA claims give, and whether the kubelet gives CPUs beside them.

    Nothing where there are none: the driver for CPUs runs on few nodes.
    """
    folder = config.paths.cdi
    try:
        found, problem = read_claims(folder)
    except KataPinError as error:
        yield Row("DRA claims", "warn", f"not read: {error.message}", error.hint)
        return
    if problem:
        yield Row("DRA claims", "warn", f"not all read: {problem}")
    if not found:
        return
    cpus = union(found.values())
    text = f"{count(len(found), 'claim')} of {pcpus.named(cpus)}"
    try:
        kubelet_state = read_kubelet(config.paths.kubelet_state)
    except KataPinError:  # has a row of its own
        kubelet_state = None
    if kubelet_state is None or not kubelet_state.static:
        yield Row("DRA claims", "ok", text)
        return
    held = union(one for entries in kubelet_state.entries.values() for one in entries.values())
    both = f"; {pcpus.named(cpus & held)} given by both" if cpus & held else ""
    text += f", beside the kubelet's static policy, which knows nothing of them{both}"
    remedy = "cpuManagerPolicy: none in the kubelet's configuration, or no DRA driver for CPUs here"
    yield Row("DRA claims", "warn", text, remedy)
