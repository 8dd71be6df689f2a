"""A libvirt of our own with one idle VM, for comparison: started, asked by virsh, ended by pid.

libvirtd runs in a mount namespace where its folders (/etc/libvirt, /run/libvirt and three others)
are empty tmpfs: it sees no other domain, and nothing that it writes outlives it. It listens on a
unix socket below the benchmark's folder only. Without systemd it makes its cgroups by itself, below
a folder `machine`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.figures import BenchError
from tests.bench.node import accelerator
from tests.support.qemu import QEMU, Accelerator, Machine, firmware
from tests.support.waiting import wait_for

LIBVIRTD = "/usr/sbin/libvirtd"
DOMAIN = "peer"

_FOLDERS = ("/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt")
_RUN = Path("/run/libvirt")
_USERS = "libvirt-qemu:x:64055:64055::/nonexistent:/usr/sbin/nologin\n"
_GROUPS = "libvirt-qemu:x:64055:\nkvm:x:64056:\n"
"""Users and groups that libvirt looks up at its start, and ends without. Debian's package does
not make them, and the benchmark adds none to this machine."""

_START = """
for name in passwd group; do
    cat /etc/$name {root}/$name.more > {root}/$name || exit 1
    mount --bind {root}/$name /etc/$name || exit 1
done
for folder in {folders}; do mkdir -p $folder && mount -t tmpfs none $folder || exit 1; done
cp {root}/qemu.conf /etc/libvirt/ && mkdir -p /etc/libvirt/qemu
exec {libvirtd} --config {root}/libvirtd.conf --pid-file {root}/pid
"""
_DAEMON = """
listen_tls = 0
listen_tcp = 0
unix_sock_dir = "{root}"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:stderr"
"""
_QEMU = """
security_driver = "none"
user = "root"
group = "root"
namespaces = []
stdio_handler = "file"
"""
_VM = """
<domain type='{type}'>
  <name>{name}</name>
  <memory unit='MiB'>{memory}</memory>
  <vcpu current='{boot}'>{maximum}</vcpu>
  <iothreads>{iothreads}</iothreads>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <loader readonly='yes' type='rom'>{firmware}</loader>
  </os>
  <features><acpi/><apic/></features>
  {cpu}
  <devices>
    <emulator>{qemu}</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
  </devices>
</domain>
"""


class Libvirt:
    """libvirtd and its VM; a context manager. Without `cgroups` it pins by affinities alone."""

    def __init__(self, root: Path, machine: Machine, *, cgroups: bool = True) -> None:
        if not os.access(LIBVIRTD, os.X_OK) or shutil.which("virsh") is None:
            raise BenchError("libvirt is missing: install libvirt-daemon and libvirt-clients")
        self.machine = machine
        self.pid = 0
        self.version = ""
        self._failure = ""
        self._cgroups = cgroups
        self._root = root / ("libvirt" if cgroups else "libvirt-bare")
        self._root.mkdir()
        self._uri = f"qemu+unix:///system?socket={self._root}/libvirt-sock"
        self._made_run = not _RUN.exists()
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
            self.virsh(f"create {self._root}/vm.xml")
            self.pid = int(self._pid_file().read_text())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def virsh(self, *commands: str) -> str:
        """Run commands in one virsh session; return what they print. BenchError when one fails."""
        argv = ["virsh", "--quiet", "--connect", self._uri, "; ".join(commands)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise BenchError(f"virsh {commands[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout

    def tids(self) -> list[int]:
        """Return the thread ids of the VM."""
        return sorted(int(name) for name in os.listdir(f"/proc/{self.pid}/task"))

    def pins(self, cpu: int) -> list[str]:
        """Return the commands that pin everything of which libvirt knows, one for each."""
        vcpus = [f"vcpupin {DOMAIN} {number} {cpu}" for number in range(self.machine.boot)]
        iothreads = range(1, len(self.machine.iothreads) + 1)
        rest = [f"iothreadpin {DOMAIN} {number} {cpu}" for number in iothreads]
        return [*vcpus, *rest, f"emulatorpin {DOMAIN} {cpu}"]

    def _start(self) -> None:
        root = self._root
        controllers = "" if self._cgroups else "cgroup_controllers = []\n"
        (root / "libvirtd.conf").write_text(_DAEMON.format(root=root))
        (root / "qemu.conf").write_text(_QEMU + controllers)
        (root / "vm.xml").write_text(self._vm())
        (root / "passwd.more").write_text(_USERS)
        (root / "group.more").write_text(_GROUPS)
        start = _START.format(
            folders=" ".join((*_FOLDERS, str(_RUN))), root=root, libvirtd=LIBVIRTD
        )
        with (root / "log").open("wb") as log:
            self._daemon = subprocess.Popen(
                ["unshare", "-m", "--propagation", "private", "sh", "-c", start],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(self._answers, "libvirtd to answer", 60)

    def _answers(self) -> bool:
        """Return whether libvirtd has answered; raises BenchError with its own reason if it ended.

        Its socket is there before its drivers have started, and goes if one of them cannot. The
        first call is slow: libvirtd looks at what QEMU can do.
        """
        assert self._daemon is not None
        if (self._root / "libvirt-sock").exists():
            try:
                self.version = self.virsh("version").splitlines()[0].rpartition(": ")[2]
            except BenchError as error:
                self._failure = str(error)
            else:
                return True
        if self._daemon.poll() is not None:
            raise BenchError(
                f"libvirtd ended with status {self._daemon.returncode}: {self._reasons()}"
            )
        return False

    def _reasons(self) -> str:
        """Return the last errors that libvirtd logged, or virsh's where it logged none."""
        log = (self._root / "log").read_text(errors="replace").splitlines()
        errors = [line.partition(": error : ")[2] or line for line in log if "error" in line]
        return "; ".join(errors[-3:]) or " ".join(log[-3:]) or self._failure or "it said nothing"

    def _pid_file(self) -> Path:
        """QEMU's pid file, seen through libvirtd's mount namespace."""
        assert self._daemon is not None
        return Path(f"/proc/{self._daemon.pid}/root/run/libvirt/qemu/{DOMAIN}.pid")

    def _vm(self) -> str:
        kvm = accelerator() is Accelerator.KVM
        _, _, without = accelerator().cpu_model.partition(",-")
        policy = f"<feature policy='disable' name='{without}'/>" if without else ""
        return _VM.format(
            type="kvm" if kvm else "qemu",
            name=DOMAIN,
            memory=self.machine.memory_mib,
            boot=self.machine.boot,
            maximum=self.machine.maximum,
            iothreads=len(self.machine.iothreads),
            firmware=firmware(),
            cpu=f"<cpu mode='host-passthrough'>{policy}</cpu>" if kvm else "",
            qemu=QEMU,
        )

    def _stop(self) -> None:
        """End the VM, then libvirtd, and remove the cgroups that it made."""
        with contextlib.suppress(BenchError, subprocess.TimeoutExpired):
            self.virsh(f"destroy {DOMAIN}")
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
        for folder in Path("/sys/fs/cgroup").glob("**/machine"):
            with contextlib.suppress(OSError):  # somebody else's machines are below
                folder.rmdir()
        if self._made_run:
            with contextlib.suppress(OSError):
                _RUN.rmdir()
