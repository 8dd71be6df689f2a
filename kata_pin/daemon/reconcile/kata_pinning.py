"""Whether Kata pins a sandbox's vCPUs too, and the evidence (D13).

The first that answers: Kata's state of the sandbox (persist.json, state.json: its own result of all
below), the annotation, the configuration file. Facts, read in Kata's sources:

- Go reads `io.katacontainers.enable_vcpus_pinning` (pkg/oci/utils.go), runtime-rs
  `io.katacontainers.config.runtime.enable_vcpus_pinning` (kata-types, annotations).
- `enable_annotations` of a configuration rules over `io.katacontainers.config.hypervisor.*` alone,
  in both runtimes; neither key is one of those, so both always count. What does decide is whether
  containerd or CRI-O hand the pod's annotations on, and that shows in config.json. So a config.json
  that can be read and lacks the key is an answer; only without it the pod's own count.
- A configuration is a sandbox's when it allows its VMM's executable, or is the one that
  `io.katacontainers.config_path` names. Several that disagree say nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from kata_pin.errors import KataPinError
from kata_pin.host.root import HostRoot
from kata_pin.model.alloc import RDT_KEY
from kata_pin.model.sandbox import Container, Vmm
from kata_pin.policy.placement.writers import NO_KATA_PINNING, KataPinning, KataPinningMode
from kata_pin.sources.bundles import BundleReader
from kata_pin.sources.kata_config import KataConfigFile
from kata_pin.vmm.state_files import KataPaths, persisted_pinning, state_stamp
from kata_pin.wire.annotations import KATA_CONFIG, KATA_PINNING, quiet_keys
from kata_pin.wire.oci import parse_config

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REMEMBERED: Final = 4096
"""Sandboxes whose answers are kept; more than a node has."""

Answer = tuple[bool, str]
"""Whether Kata's pinning is on, and the evidence."""

_FLAGS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
"""What Go's strconv.ParseBool takes; Kata refuses a sandbox with anything else."""


@dataclass(frozen=True)
class KataPinningReader:
    """Reads whether Kata pins; what never changes is read once.

    `files` are Kata's configurations as they were when the daemon started.
    """

    root: HostRoot
    paths: KataPaths
    bundles: BundleReader
    files: Sequence[KataConfigFile]
    _annotated: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _reported: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _last: dict[str, Answer] = field(default_factory=dict)

    def of(self, sandbox_id: str, containers: Iterable[Container], vmm: Vmm) -> KataPinning:
        """Return what Kata does with the sandbox's vCPUs: by NUMA where it bound guest memory.

        It is the shim that pins: without one nothing of Kata's is left to do it.
        """
        if vmm.orphan:
            return NO_KATA_PINNING
        on, evidence = self._answer(sandbox_id, containers, vmm)
        if not on:
            return KataPinning(KataPinningMode.OFF, evidence)
        mode = KataPinningMode.NUMA if vmm.guest.host_nodes else KataPinningMode.COUNT
        return KataPinning(mode, evidence)

    def take_annotations(self, sandbox_id: str, annotations: Mapping[str, str]) -> None:
        """Take a pod's annotations as NRI reports them."""
        ours = _ours(annotations)
        if ours:
            _remember(self._reported, sandbox_id, ours)

    def annotations(self, sandbox_id: str, containers: Iterable[Container]) -> Mapping[str, str]:
        """Return a pod's annotations that matter here, from config.json and from NRI's report."""
        created, _ = self._annotations(sandbox_id, containers)
        return {**self._reported.get(sandbox_id, {}), **created}

    def forget(self, sandbox_id: str) -> None:
        """Drop what was kept of a sandbox that ended."""
        for kept in (self._annotated, self._reported, self._last):
            kept.pop(sandbox_id, None)

    def _answer(self, sandbox_id: str, containers: Iterable[Container], vmm: Vmm) -> Answer:
        persisted = persisted_pinning(self.root, self.paths, sandbox_id)
        if persisted is not None:
            _remember(self._last, sandbox_id, persisted)
            return persisted
        if sandbox_id in self._last and any(state_stamp(self.root, self.paths, sandbox_id)):
            return self._last[sandbox_id]  # it is being written: use the previous answer
        annotations, place = self._annotations(sandbox_id, containers)
        for key in KATA_PINNING:
            value = _FLAGS.get(annotations.get(key, ""))
            if value is not None:
                return value, f"annotation {key} in {place}"
        return self._configured(annotations.get(KATA_CONFIG, ""), vmm)

    def _annotations(
        self, sandbox_id: str, containers: Iterable[Container]
    ) -> tuple[Mapping[str, str], str]:
        """Return the annotations that the sandbox was created with, and their source."""
        if sandbox_id in self._annotated:
            return self._annotated[sandbox_id], "config.json"
        for container in containers:
            if container.id == sandbox_id and container.bundle:
                try:
                    config = parse_config(self.bundles.read_config(container.bundle))
                except KataPinError as error:
                    log.debug("sandbox %s: %s", sandbox_id, error)
                    continue
                _remember(self._annotated, sandbox_id, _ours(config.annotations))
                return config.annotations, "config.json"
        return self._reported.get(sandbox_id, {}), "the pod"

    def _configured(self, named: str, vmm: Vmm) -> Answer:
        """Return what Kata's configuration says about sandboxes with this VMM."""
        found = {
            file.path: config.vcpu_pinning
            for file in self.files
            for config in file.configs
            if _is_meant(file, config.binaries, named, vmm)
        }
        if not any(found.values()):
            return False, ""
        if not all(found.values()):
            return False, f"{len(found)} Kata configurations that disagree"
        return True, ", ".join(found)


def _ours(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return those that matter here: others may be long."""
    kept = (*KATA_PINNING, KATA_CONFIG, RDT_KEY, *quiet_keys(annotations))
    return {key: annotations[key] for key in kept if key in annotations}


def _is_meant(file: KataConfigFile, binaries: Sequence[str], named: str, vmm: Vmm) -> bool:
    if named.startswith("/"):
        return file.path == os.path.realpath(named)
    jailed = (f"/{os.path.basename(pattern)}" for pattern in binaries)  # as it is seen in a jail
    return any(fnmatchcase(vmm.exe, pattern) for pattern in (*binaries, *jailed))


def _remember(kept: dict[str, T], sandbox_id: str, value: T) -> None:
    if len(kept) >= MAX_REMEMBERED and sandbox_id not in kept:
        del kept[next(iter(kept))]
    kept[sandbox_id] = value
