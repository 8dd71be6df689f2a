"""A sandbox and its containers through their life, step by step as Kata's Go runtime does it.

create (sandbox): cgroup, VM, prestart and createRuntime hooks while qmp.sock is free, QEMU into its
cgroup, then as any container. create (container): vCPUs, cpuset, persist.json, then its hooks.
start: persist.json, vCPUs, poststart. update: vCPUs, cpuset, persist.json; no hook. delete: cpuset,
persist.json, poststop. runtime_rs.py has what runtime-rs does otherwise.
Facts: Kata's sandbox.go, katautils/create.go, containerd-shim-v2, and recordings of 3.21.
Everything runs in one thread; its id is the `pid` that poststart and poststop hooks are told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from tests.e2e.minikata import hooks, sizing
from tests.e2e.minikata.agent import Agent
from tests.e2e.minikata.cgroups import Cgroup, sandbox_path
from tests.e2e.minikata.container import Container
from tests.e2e.minikata.files import Files, persist
from tests.e2e.minikata.ledger import Ledger
from tests.e2e.minikata.pinning import OwnPinning, PanicError
from tests.e2e.minikata.settings import Settings
from tests.e2e.minikata.vm import Vm

AGENT_S = 20.0


class Refused(Exception):  # noqa: N818 - the caller's mistake, in runc's words
    """A command that makes no sense now."""


class Sandbox:
    """One pod under the Go runtime."""

    def __init__(self, pod: Container, settings: Settings, ledger: Ledger) -> None:
        self.id = pod.id
        self._pod = pod
        self._settings = settings
        self._containers = {pod.id: pod}
        self._files = Files(settings, pod.id, pod.bundle)
        self._vm = Vm(pod.id, settings, self._files, ledger)
        self._say = ledger.say
        self._pinning = OwnPinning(go=settings.go)
        self._up = False
        path = sandbox_path(pod.cgroups_path, pod.id, "kata_" if settings.go else "")
        self._cgroup = Cgroup(path, cpuset=True, ledger=ledger)
        self._overhead = (
            self._cgroup
            if settings.cgroup_only
            else Cgroup(f"/kata_overhead/{pod.id}", cpuset=False, ledger=ledger)
        )

    def container(self, name: str) -> Container:
        """Return a container; Refused when there is none of that name."""
        if name not in self._containers:
            raise Refused(f"container {name} does not exist")
        return self._containers[name]

    # ---- the commands ------------------------------------------------------------------------

    def create_sandbox(self) -> None:
        """Boot the VM, run the hooks, confine it, take in the pod's own container."""
        self._overhead.add_process(os.getpid())
        self._files.open_shim_monitor()
        try:
            self._boot()
            self._take_in(self._pod)
        except PanicError:
            raise
        except BaseException:
            self.stop()
            raise

    def create(self, container: Container) -> None:
        """Take in a container; one whose hook fails stays in persist.json, as in Kata.

        Not one whose program does not exist: the agent refuses it, and Kata rolls back.
        """
        self._need_vm()
        if container.missing_program:
            raise Refused(f"the file {container.missing_program} was not found")
        self._containers[container.id] = container
        self._take_in(container)
        self._run_create_hooks(container, container_hooks=True)

    def start(self, name: str) -> None:
        """Start a container."""
        container = self.container(name)
        if container.state != "ready":
            raise Refused(f"cannot start a container that is {container.state}")
        container.state = "running"
        self._say(f"{name} starts with affinities {self._vm.affinities()}")
        self._agent.start(name)
        self._store(container)
        if not container.is_pod_sandbox:
            self._resize()
            self._check_pinning()
        self._run_after_hooks("poststart", container, "running")

    def update(self, name: str, cpu: Mapping[str, Any]) -> None:
        """Change a container's resources. No hook runs."""
        container = self.container(name)
        self._need_vm()
        container.merge(cpu)
        self._agent.update(name, container.cpu)
        self._resize()
        self._write_cpuset()
        self._check_pinning()
        self._store(container)

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a container's process."""
        container = self.container(name)
        if not container.runs():
            raise Refused("container not running")
        os.kill(container.placeholder, number)

    def exited(self, name: str) -> None:
        """Take note that a container's process is gone: with the pod's own, the VM ends."""
        container = self._containers.get(name)
        if container is None or container.state == "stopped":
            return
        container.state = "stopped"
        if container.is_pod_sandbox:
            self.stop()
        else:
            self._store(container)

    def delete(self, name: str, *, force: bool) -> None:
        """Forget a container: its CPUs leave the cpuset now, not when it stopped."""
        container = self.container(name)
        if container.runs():
            if not force:
                raise Refused(f"cannot delete container {name} that is not stopped")
            with contextlib.suppress(ProcessLookupError):
                os.kill(container.placeholder, signal.SIGKILL)
        self.exited(name)
        if not container.is_pod_sandbox:
            del self._containers[name]
            self._files.remove_container(name)
            if self._up:
                self._agent.remove(name)
                self._write_cpuset()
                self._check_pinning()
                self._store()
        self._run_after_hooks("poststop", container, "stopped")
        container.close()

    def state(self, name: str) -> dict[str, Any]:
        """Return the OCI state; as with Kata 3.21 every container has QEMU's pid."""
        container = self.container(name)
        word = {"ready": "created"}.get(container.state, container.state)
        return {
            "ociVersion": "1.0.2",
            "id": name,
            "pid": self._vm.pid if self._up and container.state != "stopped" else 0,
            "status": word,
            "bundle": container.bundle,
            "annotations": container.annotations,
        }

    def stop(self) -> None:
        """End the VM and remove its files; the cgroups stay behind, empty."""
        self._up = False
        self._vm.stop()
        self._files.remove()

    # ---- steps -------------------------------------------------------------------------------

    def _boot(self) -> None:
        self._vm.start(self._pod.netns)
        self._up = True
        self._vm.let_go()
        self._run_create_hooks(self._pod, container_hooks=False)
        self._vm.hold()
        self._confine()
        self._vm.wait_for_guest()

    def _take_in(self, container: Container) -> None:
        self._agent.create(container.id, container.guest_arguments)
        self._resize()
        self._write_cpuset()
        self._check_pinning()
        self._store(container)

    @property
    def _agent(self) -> Agent:
        """The guest's agent; an idle guest has none."""
        settings = self._settings
        linux = settings.guest == "linux"
        if linux and (end := self._vm.end()):
            raise RuntimeError(end)
        return Agent(self._vm.cid if linux else 0, AGENT_S * settings.scale)

    def _resize(self) -> None:
        """Size the VM by the containers that are not stopped."""
        cpus = [one.cpu for one in self._containers.values() if one.state != "stopped"]
        self._vm.resize(sizing.wanted_go(self._settings.default_vcpus, cpus))

    def _confine(self) -> None:
        if not self._settings.cgroup_only:
            self._cgroup.add_threads(self._vm.pid, self._vm.vcpus().values())

    def _write_cpuset(self) -> None:
        """Write the union of all containers' cpusets, stopped ones too; new vCPUs move in."""
        self._cgroup.set_cpuset(
            sizing.text(self._union()),
            sizing.text(sizing.union({"cpus": one.cpu.get("mems")} for one in self._all())),
        )
        self._confine()

    def _check_pinning(self) -> None:
        if self._settings.enable_vcpus_pinning:
            self._pinning.check(self._vm.vcpus(), self._union())

    def _store(self, container: Container | None = None) -> None:
        """Rewrite persist.json, and a container's own."""
        if container is not None:
            self._files.write_container(container.id, container.state)
        hypervisor = {
            "UUID": self._vm.uuid,
            "HotpluggedVCPUs": [{"ID": name} for name in self._vm.plugged],
            "VirtiofsDaemonPid": self._vm.file_server_pid,
            "Pid": self._vm.pid,
        }
        document = persist(
            self._settings,
            hypervisor,
            (self._cgroup.path, self._overhead.path if not self._settings.cgroup_only else ""),
            [one.entry() for one in self._all()],
            state="running" if self._pod.state == "running" else "ready",
            netns=self._pod.netns,
            cid=self._vm.cid,
        )
        self._files.write_sandbox(document)

    def _run_create_hooks(self, container: Container, *, container_hooks: bool) -> None:
        """Run prestart and createRuntime: those of the sandbox in the host's network namespace."""
        netns = self._pod.netns if container_hooks else ""
        for phase in ("prestart", "createRuntime"):
            state = self._go_state(container.id, self._vm.pid, container)
            hooks.run_go(container.hooks(phase), state, netns)

    def _run_after_hooks(self, phase: str, container: Container, status: str) -> None:
        """Run poststart or poststop: `id` is the sandbox's, `pid` a thread of ours."""
        del status  # the Go runtime leaves it empty
        netns = self._pod.netns if phase == "poststart" else ""
        state = self._go_state(self.id, threading.get_native_id(), container)
        try:
            hooks.run_go(container.hooks(phase), state, netns)
        except hooks.HookError as error:
            self._say(f"{phase}: {error}")

    @staticmethod
    def _go_state(name: str, pid: int, container: Container) -> dict[str, Any]:
        return {
            "ociVersion": "",
            "id": name,
            "status": "",
            "pid": pid,
            "bundle": container.bundle,
            "annotations": container.go_annotations(),
        }

    def _need_vm(self) -> None:
        if not self._up:
            raise Refused("the sandbox is stopped")

    def _all(self) -> list[Container]:
        return list(self._containers.values())

    def _union(self) -> set[int]:
        return sizing.union(one.cpu for one in self._all())
