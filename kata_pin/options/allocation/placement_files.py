"""What a container can read about its placement: environment variables and a file."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from typing import Final

from msgspec.structs import replace

from kata_pin.base.allocation import Decision, Grant, Mount
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.errors import reason_of

log = logging.getLogger(__name__)


# A Kata container runs in a VM, where the host's CPU numbers mean nothing: it gets its guest CPUs,
# and only in the file, because they are known only once its vCPUs are there.

PREFIX: Final = "KATA_PIN_"
"""Begins the name of each variable in the environment."""


def values(grant: Grant, topology: HostTopology) -> dict[str, str]:
    """Return what is known when a container is created, by name; CPUs in Linux's list format."""
    found = {"CLASS": grant.cpu_class.value}
    if grant.request.pod.kata:
        return found | {"CPU_COUNT": str(len(grant.exclusive))}
    nodes = CpuSet(node for node, cpus in topology.nodes.items() if cpus & grant.cpus)
    return found | {
        "CPUS": str(grant.cpus),
        "EXCLUSIVE_CPUS": str(grant.exclusive),
        "SHARED_CPUS": str(grant.shared or ""),
        "NUMA_NODES": str(nodes),
    }


def file_text(grant: Grant, topology: HostTopology, guest_cpus: CpuSet | None) -> str:
    """Return the file's text, a line per value, as a shell reads it.

    `guest_cpus` are those that a Kata container is confined to, None while that is unknown.
    """
    found = values(grant, topology)
    if grant.request.pod.kata:
        found["GUEST_CPUS"] = str(guest_cpus or "")
    return "".join(f"{name}={value}\n" for name, value in found.items())


# The settings are `alloc.placement_env` and `alloc.placement_file`. Each container has a folder of
# its own, which is mounted into it read-only; the file in it is replaced as a whole. A mounted
# folder shows the new file, where a mounted file would keep showing the old one. Kata shares the
# folder with the guest by virtiofs, or copies it once where the VM has no shared filesystem
# (virtcontainers/fs_share_linux.go).
#
# Lifetime: the daemon's; the folders survive it, as the containers do.

FOLDER: Final = "placements"
FILE: Final = "placement"


class PlacementFiles:
    """Writes the files, and adds them and the environment to what a new container gets."""

    def __init__(self, runtime_dir: str, settings: Alloc) -> None:
        """`runtime_dir` must have the same path for the runtime."""
        self._home = os.path.join(runtime_dir, FOLDER)
        self._environment = settings.placement_env
        self._destination = settings.placement_file
        self._texts: dict[str, str] = {}
        self._problem = ""

    @property
    def on(self) -> bool:
        """Whether containers get a file."""
        return bool(self._destination)

    def announced(self, decision: Decision, container_id: str, topology: HostTopology) -> Decision:
        """Return a decision in which a new container gets environment and file, which is written.

        Those of an earlier instance of the container are replaced.
        """
        grant = decision.state.get(container_id)
        refused = decision.refused is not None and decision.refused.strict
        if grant is None or refused or not (self._environment or self.on):
            return decision
        creation = grant.creation
        env = [one for one in creation.env if not one[0].startswith(PREFIX)]
        mounts = [one for one in creation.mounts if one.destination != self._destination]
        if self._environment:
            env += [(PREFIX + name, value) for name, value in values(grant, topology).items()]
        if self.on and self.write(container_id, file_text(grant, topology, None)):
            mounts.append(Mount(self._destination, os.path.join(self._home, container_id)))
        more = replace(grant, creation=replace(creation, env=tuple(env), mounts=tuple(mounts)))
        return replace(
            decision,
            state=decision.state.with_grant(more),
            changed=tuple(more if one == grant else one for one in decision.changed),
        )

    def containers(self) -> list[str]:
        """Return the ids of the containers that have a folder."""
        try:
            return os.listdir(self._home)
        except OSError:
            return []

    def write(self, container_id: str, text: str) -> bool:
        """Replace a container's file if its text has changed; return whether it is there."""
        name = container_id
        if self._texts.get(name) == text:
            return True
        folder = os.path.join(self._home, name)
        fresh = os.path.join(folder, f".{FILE}.new")
        try:
            for path in (self._home, folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                    os.chmod(path, 0o755)  # noqa: S103 - whoever the container runs as reads it
            with contextlib.suppress(FileNotFoundError):  # what a killed daemon left
                os.unlink(fresh)
            with open(fresh, "x", encoding="ascii") as file:
                file.write(text)
            os.chmod(fresh, 0o444)
            os.rename(fresh, os.path.join(folder, FILE))
        except OSError as error:
            if reason_of(error) != self._problem:
                log.error("allocator: placement of a container not written: %s", reason_of(error))
            self._problem = reason_of(error)
            return False
        self._texts[name], self._problem = text, ""
        return True

    def remove(self, container_id: str) -> None:
        """Remove the folder of a container that has ended."""
        self._texts.pop(container_id, None)
        shutil.rmtree(os.path.join(self._home, container_id), ignore_errors=True)
