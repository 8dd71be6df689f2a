"""The VM of one sandbox: devices, virtiofsd and QEMU; vCPUs plugged and unplugged; its end.

LocalShim (tests/support/shim.py) starts QEMU and speaks QMP as Kata does; this adds what a whole
sandbox has. QEMU and virtiofsd are children of the service, in its cgroup at first, and in the
pod's network namespace. They outlive the service when it dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from tests.e2e.minikata import machine
from tests.e2e.minikata.devices import Devices
from tests.e2e.minikata.files import Files
from tests.e2e.minikata.hooks import network_namespace
from tests.e2e.minikata.ledger import Ledger
from tests.e2e.minikata.machine import Machine
from tests.e2e.minikata.settings import Settings
from tests.support.monitor import MonitorError
from tests.support.shim import LocalShim
from tests.support.waiting import wait_for

QMP_S = 30.0
GUEST_S = 60.0
READY = b"minikata-guest: ready"
"""What the test guest prints on its console once it runs (tests/e2e/guest)."""
LAST_LINES = 40
"""What is kept of the logs of a QEMU that has ended."""


class RsShim(LocalShim):
    """QMP as runtime-rs speaks it: vCPUs are named by core, the highest one goes first."""

    def _new_id(self, props: Mapping[str, int]) -> str:
        return f"cpu-{props['core-id']}"

    def _next_to_go(self) -> str:
        return max(self.plugged, key=lambda name: int(name.partition("-")[2]))


class Vm:
    """One VM. QMP is held after start()."""

    def __init__(self, sandbox: str, settings: Settings, files: Files, ledger: Ledger) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._files = files
        self._ledger = ledger
        self._devices = Devices()
        kind = LocalShim if settings.go else RsShim
        idle = settings.guest == "idle"
        self._shim = kind(QMP_S * settings.scale, eject_by_nmi=idle, note=ledger.note_process)
        self._file_server: subprocess.Popen[bytes] | None = None
        self.uuid = _uuid()
        self.pid = 0

    @property
    def _log(self) -> str:
        return f"{self._files.vm}/qemu.log"

    @property
    def cid(self) -> int:
        """The guest's vsock address, 0 without vsock."""
        return self._devices.cid

    @property
    def file_server_pid(self) -> int:
        """The pid of virtiofsd, 0 without."""
        return self._file_server.pid if self._file_server else 0

    @property
    def vcpu_count(self) -> int:
        """How many vCPUs there are."""
        return self._settings.default_vcpus + len(self._shim.plugged)

    @property
    def plugged(self) -> tuple[str, ...]:
        """The ids of the hotplugged vCPUs."""
        return self._shim.plugged

    def start(self, netns: str) -> None:
        """Start virtiofsd and QEMU, and return when QMP answers."""
        settings = self._settings
        with network_namespace(netns):
            if settings.vsock:
                self._devices.open_vsock(self._ledger.say)
            if settings.network:
                # The pod's namespace has Kata's own name for it, the host's one for each sandbox.
                name = "tap0_kata" if netns else f"tap{os.urandom(4).hex()}"
                self._devices.open_network(name, self._ledger.say)
            if settings.virtiofsd:
                self._start_file_server()
            self._start_qemu()
        self._devices.close()

    def let_go(self) -> None:
        """Free qmp.sock; only the Go runtime does, while the sandbox's hooks run."""
        self._shim.let_go()

    def hold(self) -> None:
        """Take qmp.sock, for good."""
        self._shim.hold()

    def wait_for_guest(self) -> None:
        """Wait until the guest has booted, as Kata waits for its agent; an idle one has none."""
        if self._settings.guest == "idle":
            return
        text = b""
        with socket.socket(socket.AF_UNIX) as console:
            console.settimeout(GUEST_S * self._settings.scale)
            console.connect(self._files.places.console)
            while READY not in text:
                part = console.recv(4096)
                if not part:
                    raise RuntimeError(f"the guest ended: {text[-400:]!r}")
                text += part

    def resize(self, wanted: int) -> None:
        """Plug or unplug vCPUs until there are `wanted`, as far as the VM can.

        With static sizing there is nothing to do.
        """
        if self._settings.static:
            return
        wanted = max(self._settings.default_vcpus, min(wanted, self._settings.maximum))
        more = wanted - self.vcpu_count
        try:
            if more > 0:
                self._shim.plug(more)
            elif more < 0:
                self._shim.unplug(-more)
        except (MonitorError, TimeoutError) as error:
            raise RuntimeError(f"resize to {wanted} vCPUs: {error}") from error

    def vcpus(self) -> dict[int, int]:
        """Return the thread of each vCPU, by QEMU's cpu-index."""
        listed: list[dict[str, Any]] = self._shim.execute("query-cpus-fast")
        return {cpu["cpu-index"]: cpu["thread-id"] for cpu in listed}

    def affinities(self) -> dict[str, int]:
        """Return how many threads of QEMU may run on which CPUs now, as `0-1,3`-like lists."""
        found: dict[str, int] = {}
        for name in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                cpus = ",".join(map(str, sorted(os.sched_getaffinity(int(name)))))
                found[cpus] = found.get(cpus, 0) + 1
        return found

    def end(self) -> str:
        """Return how QEMU has ended by itself and what was said last, empty while it runs.

        It ends with 0 when its guest panics, which says so on its console, or is reset.
        """
        status = self._shim.ended
        if status is None:
            return ""
        said = [
            line
            for log in (self._log, self._files.places.console_log)
            for line in _read(log).splitlines()
            if READY.decode() not in line
        ]
        return "\n".join((f"QEMU had ended with {status}", *said[-LAST_LINES:]))

    def stop(self) -> None:
        """End QEMU and virtiofsd."""
        self._shim.stop()
        if self._file_server is not None:
            with contextlib.suppress(ProcessLookupError):
                self._file_server.send_signal(signal.SIGTERM)
            try:
                self._file_server.wait(2)
            except subprocess.TimeoutExpired:
                self._file_server.kill()
                self._file_server.wait()

    def _start_file_server(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._files.places.file_server)
            listener.listen(1)
            argv = machine.file_server_command(self._files.places.shared, listener.fileno())
            if not argv:
                self._ledger.say("no virtiofsd")
                return
            self._file_server = subprocess.Popen(
                argv,
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self._ledger.note_process(self._file_server.pid)

    def _start_qemu(self) -> None:
        settings = self._settings
        iothread = f"iothread-{os.urandom(8).hex()}" if settings.go else "scsi-io-thread"
        made = Machine(
            sandbox=self._sandbox,
            uuid=self.uuid,
            settings=settings,
            places=self._files.places,
            accel=machine.accel(settings.accel),
            iothread=iothread if settings.enable_iothreads else "",
            mac=":".join(f"{byte:02x}" for byte in (0xB6, *os.urandom(5))),
            char=f"char-{os.urandom(8).hex()}",
        )
        argv = machine.command_line(made, self._devices, file_server=self._file_server is not None)
        self.pid = self._shim.start(argv, self._files.qmp, self._log, self._devices.descriptors)
        if settings.go:
            wait_for(lambda: os.path.exists(self._files.places.pidfile), "QEMU's pid file")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _uuid() -> str:
    text = os.urandom(16).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
