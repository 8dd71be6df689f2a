"""What runtime-rs does otherwise than the Go runtime (sandbox.py).

qmp.sock is held from the VM's start on, through the hooks. Only the sandbox's prestart and
createRuntime hooks run; every container has createContainer hooks, before it is made and in the
VM's network namespace. The state is whole. The VM is never made smaller by a new container, and an
update of a cpuset alone does not count once there was a quota. state.json is written once. By
default the VM is sized before it boots (settings.py), and all is in the pod's cgroup.
Facts: virt_container sandbox.rs and container_manager, cpu_mem/cpu.rs, a recording of 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.e2e.minikata import hooks, sizing
from tests.e2e.minikata.container import Container
from tests.e2e.minikata.files import rs_state
from tests.e2e.minikata.sandbox import Sandbox


class RsSandbox(Sandbox):
    """One pod under runtime-rs."""

    def create(self, container: Container) -> None:
        """Take in a container after its createContainer hooks."""
        self._need_vm()
        self._containers[container.id] = container
        self._take_in(container)

    def start(self, name: str) -> None:
        """Start a container: nothing is sized or written again."""
        container = self.container(name)
        container.state = "running"
        self._agent.start(name)
        self._run_after_hooks("poststart", container, "running")

    def update(self, name: str, cpu: Mapping[str, Any]) -> None:
        """Change a container's resources; the VM may become smaller."""
        container = self.container(name)
        self._need_vm()
        had_quota = bool(sizing.quota(container.cpu))
        container.merge(cpu)
        self._agent.update(name, container.cpu)
        if not had_quota or cpu.get("quota"):
            self._vm.resize(self._wanted())
        self._write_cpuset()
        self._check_pinning()

    def _boot(self) -> None:
        self._vm.start(self._pod.netns)
        self._up = True
        if self._settings.cgroup_only:
            self._overhead.add_process(self._vm.pid)
        for phase in ("prestart", "createRuntime"):
            self._run_rs(phase, self._pod, "creating", "")
        self._confine()
        self._vm.wait_for_guest()
        paths = (self._cgroup.path, f"/kata_overhead/{self.id}")
        self._files.write_sandbox(rs_state(self._settings, self.id, paths))

    def _take_in(self, container: Container) -> None:
        self._run_rs("createContainer", container, "creating", self._pod.netns)
        super()._take_in(container)

    def _resize(self) -> None:
        self._vm.resize(max(self._wanted(), self._vm.vcpu_count))

    def _wanted(self) -> int:
        cpus = [one.cpu for one in self._all() if one.state != "stopped"]
        return sizing.wanted_rs(self._settings.default_vcpus, cpus)

    def _store(self, container: Container | None = None) -> None:
        del container  # there is no file of containers

    def _run_after_hooks(self, phase: str, container: Container, status: str) -> None:
        self._run_rs(phase, container, status, "")

    def _run_rs(self, phase: str, container: Container, status: str, netns: str) -> None:
        state = {
            "ociVersion": "1.1.0",
            "id": container.id,
            "status": status,
            "pid": self._vm.pid,
            "bundle": container.bundle,
            "annotations": container.annotations,
        }
        hooks.run_rs(container.hooks(phase), state, netns)
