"""One container of a sandbox: its config.json, its live resources, where it stands in its life.

The process that containerd tracks is a placeholder: the real one would be in the guest. It ends
when its lifeline, a descriptor of the service, closes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from tests.e2e.minikata.hooks import Hook

_SANDBOX_TYPES: Final = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
_SIZES: Final = ("quota", "period", "shares")


class Container:
    """A container as Kata keeps it; `state` is ready, running or stopped."""

    def __init__(self, name: str, bundle: str, placeholder: int, lifeline: int) -> None:
        with open(f"{bundle}/config.json", encoding="utf-8") as file:
            self._spec: dict[str, Any] = json.load(file)
        self.id = name
        self.bundle = bundle
        self.placeholder = placeholder
        self._lifeline = lifeline
        self.state = "ready"
        linux = self._spec.get("linux") or {}
        self.cgroups_path: str = linux.get("cgroupsPath") or ""
        self.resources: dict[str, Any] = dict(linux.get("resources") or {})
        self.resources["cpu"] = dict(self.resources.get("cpu") or {})
        self.netns = next(
            (
                str(one.get("path") or "")
                for one in linux.get("namespaces") or []
                if one.get("type") == "network"
            ),
            "",
        )

    @property
    def annotations(self) -> dict[str, str]:
        """The annotations of config.json."""
        return dict(self._spec.get("annotations") or {})

    @property
    def is_pod_sandbox(self) -> bool:
        """Whether it is the pod's own container, or alone without a pod."""
        return all(self.annotations.get(key) != "container" for key in _SANDBOX_TYPES)

    @property
    def guest_arguments(self) -> list[str]:
        """What runs in the guest: the annotation `minikata.guest.run`, else nothing much.

        The process of config.json is not taken: the container's root filesystem is not in there.
        """
        text = self.annotations.get("minikata.guest.run", "")
        return ["sh", "-c", text] if text else ["sleep", "1000000"]

    @property
    def missing_program(self) -> str:
        """The program of config.json where its folder is in the root filesystem and it is not."""
        program = str(((self._spec.get("process") or {}).get("args") or [""])[0])
        path = f"{self.bundle}/rootfs{program}"
        there = not os.path.isdir(os.path.dirname(path)) or os.path.lexists(path)
        return "" if there or not program.startswith("/") else program

    @property
    def cpu(self) -> Mapping[str, Any]:
        """The live CPU resources."""
        cpu: dict[str, Any] = self.resources["cpu"]
        return cpu

    def hooks(self, phase: str) -> list[Hook]:
        """Return the hooks of a phase."""
        return list((self._spec.get("hooks") or {}).get(phase) or [])

    def go_annotations(self) -> dict[str, str]:
        """Return the annotations as the Go runtime's hooks and persist.json have them."""
        kind = "pod_sandbox" if self.is_pod_sandbox else "pod_container"
        found = self.annotations
        found["io.katacontainers.pkg.oci.bundle_path"] = self.bundle
        found["io.katacontainers.pkg.oci.container_type"] = kind
        if self.is_pod_sandbox and self.netns:
            found["nerdctl/network-namespace"] = self.netns
        return dict(sorted(found.items()))

    def merge(self, cpu: Mapping[str, Any]) -> None:
        """Take an update as Kata does: empty and zero values leave what there was."""
        live = self.resources["cpu"]
        live.update({key: cpu[key] for key in _SIZES if cpu.get(key)})
        live.update({key: cpu[key] for key in ("cpus", "mems") if cpu.get(key)})

    def entry(self) -> dict[str, Any]:
        """Return its entry in persist.json."""
        root = (self._spec.get("root") or {}).get("path") or "rootfs"
        return {
            "Annotations": self.go_annotations(),
            "Resources": {key: value for key, value in self.resources.items() if value},
            "ID": self.id,
            "RootFs": os.path.join(self.bundle, root),
        }

    def close(self) -> None:
        """Let go of the placeholder; a container is not used after this."""
        os.close(self._lifeline)

    def runs(self) -> bool:
        """Whether the placeholder still runs; a zombie does not."""
        try:
            with open(f"/proc/{self.placeholder}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(") ")[2][0] not in "ZX"
        except OSError:
            return False
