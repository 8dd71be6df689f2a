"""One lab machine: a QEMU process, known by its pid and start time, and its folder.

Lifetime: from `boot` to `stop`; what the machine writes to its disk goes to an unnamed file that
the kernel frees when QEMU ends, so each boot begins with the image as built. The machine has no
network device. QEMU listens on unix sockets in the machine's folder (mode 0700) and nowhere else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.lab import accel, process
from tests.lab.channel import PORTS, Channel, socket_name
from tests.lab.errors import DeadlineError, LabError, NotUpError
from tests.lab.flavours import FLAVOURS, SUITES, Accel, Flavour
from tests.lab.image import Image, Tell
from tests.lab.needs import missing_to_boot, missing_to_build, missing_to_test, require
from tests.lab.rootfs import RootBuilder
from tests.lab.settings import Settings

QEMU: Final = "qemu-system-x86_64"
FIRMWARE: Final = ("usr/share/qemu", "usr/share/seabios")
BOOT_S: Final = 60
"""Deadline of a boot under KVM; multiplied by the scale."""
ANSWER_S: Final = 6
"""Deadline for the agent of a running machine to answer; multiplied by the scale."""


@dataclass(frozen=True, slots=True)
class Running:
    """What is known of a started machine; kept in its folder as machine.json."""

    flavour: str
    pid: int
    started: int
    accel: Accel
    scale: float
    image: str
    boot_s: float | None = None
    """Seconds from the start of QEMU to `systemctl is-system-running`; None until it is up."""


class Machine:
    """The machine of one flavour, running or not."""

    def __init__(self, settings: Settings, flavour: Flavour, tell: Tell) -> None:
        self.flavour = flavour
        self.folder = settings.cache / "machines" / flavour.name
        self._settings = settings
        self._tell = tell

    @property
    def console(self) -> Path:
        """What the machine printed on its serial console."""
        return self.folder / "console.log"

    def running(self) -> Running | None:
        """Return what runs, or None; the pid is compared with its start time."""
        try:
            known: dict[str, Any] = json.loads((self.folder / "machine.json").read_text())
            running = Running(**known)
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return running if process.start_time(running.pid) == running.started else None

    def need(self) -> Running:
        """Return what runs; raise LabError when nothing does."""
        running = self.running()
        if running is None:
            raise LabError(
                f"{self.flavour.name} is not running (scripts/lab boot {self.flavour.name})"
            )
        return running

    def check_needs(self, *, built: bool, results: Path | None = None) -> None:
        """Raise LabError naming everything that is missing here, before anything is begun.

        That is to boot; to build, unless the image is `built`; to run the tests, if there is a
        folder for their `results`.
        """
        cache = self._settings.cache
        missing = [] if built else missing_to_build(self.flavour.suite.name, cache)
        missing += missing_to_boot(cache)
        missing += missing_to_test(results) if results else []
        require(missing, f"{'test in' if results else 'boot'} a lab machine")

    def boot(self, image: Image, *, die_with_us: bool = False) -> Running:
        """Start the machine and wait until systemd says that it runs.

        With `die_with_us` the kernel ends QEMU when this process ends, however it ends. Raises
        NotUpError, with the console, when it does not come up; nothing is left running then.
        """
        if self.running():
            raise LabError(f"{self.flavour.name} is running already")
        require(missing_to_boot(self._settings.cache), "boot a lab machine")
        chosen = accel.choose(self._settings, self.flavour, image, self._tell)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, mode=0o700)
        began = time.monotonic()
        child = self._start(image, chosen, die_with_us=die_with_us)
        try:
            running = Running(
                flavour=self.flavour.name,
                pid=child.pid,
                started=process.start_time(child.pid),
                accel=chosen,
                scale=accel.SCALE[chosen] * self._settings.scale,
                image=image.folder.name,
            )
            self._remember(running)
            self._wait_until_up(child, running)
            running = Running(**{**asdict(running), "boot_s": time.monotonic() - began})
            self._remember(running)
        except BaseException:
            process.end_group(child)
            raise
        self._tell(f"{self.flavour.name}: up after {running.boot_s:.0f} s ({chosen})")
        return running

    def stop(self) -> bool:
        """End the machine; return False when it was not running.

        Its disk is thrown away, so it is not asked to shut down.
        """
        running = self.running()
        if running is None:
            return False
        process.end_process(running.pid, running.started)
        (self.folder / "machine.json").unlink(missing_ok=True)
        return True

    def destroy(self) -> None:
        """End the machine and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self) -> Channel:
        """Return a channel to the running machine."""
        running = self.need()
        return Channel.connect(self.folder, deadline_s=ANSWER_S * running.scale)

    def _remember(self, running: Running) -> None:
        file = self.folder / "machine.json"
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(running), indent=1))
        new.rename(file)

    def _start(self, image: Image, chosen: Accel, *, die_with_us: bool) -> subprocess.Popen[bytes]:
        argv = self.arguments(image, chosen)
        if die_with_us:
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        with (self.folder / "qemu.log").open("wb") as log:
            return subprocess.Popen(
                ["nice", "-n", "5", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # The throw-away disk is made where there is room for it.
                env={**os.environ, "TMPDIR": str(self._settings.cache)},
                start_new_session=True,
            )

    def arguments(self, image: Image, chosen: Accel) -> list[str]:
        """Return QEMU's command line; sockets and logs are relative to the machine's folder."""
        argv = self._qemu() if chosen == "tcg" else [QEMU]
        argv += ["-name", f"kata-pin-lab-{self.flavour.name},debug-threads=on"]
        argv += [
            "-nodefaults",
            "-no-user-config",
            "-machine",
            "q35,sata=off,smbus=off,i8042=off",
            "-display",
            "none",
        ]
        argv += ["-accel", "kvm" if chosen == "kvm" else "tcg,thread=multi,tb-size=512"]
        argv += self.flavour.cpu_arguments(chosen)
        argv += ["-kernel", str(image.kernel), "-initrd", str(image.initrd)]
        argv += ["-append", self.flavour.kernel_arguments, "-no-reboot"]
        argv += ["-drive", f"file={image.disk},if=virtio,format=raw,cache=unsafe,snapshot=on"]
        argv += ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        # for tests of interrupts: a NIC connected to nothing, and a disk that keeps nothing
        argv += ["-device", "virtio-net-pci"]
        argv += ["-blockdev", "driver=null-co,node-name=empty,size=67108864,read-zeroes=on"]
        argv += ["-device", "nvme,drive=empty,serial=kata-lab"]
        for port in range(PORTS):
            argv += [
                *("-chardev", f"socket,id=agent{port},path={socket_name(port)},server=on,wait=off"),
                *("-device", f"virtserialport,chardev=agent{port},name=kata-lab.{port}"),
            ]
        # The console can be joined by hand: socat - UNIX-CONNECT:console.sock
        argv += [
            "-chardev",
            "socket,id=tty,path=console.sock,server=on,wait=off,logfile=console.log",
        ]
        argv += ["-serial", "chardev:tty", "-qmp", "unix:qmp.sock,server=on,wait=off"]
        return argv

    def _qemu(self) -> list[str]:
        """Return the words that start QEMU: of Debian 13's, those of its lab root's own loader.

        Before 8.1, QEMU emulating several CPUs may run what a CPU has just overwritten, and a
        kernel that changes its own code (tracepoints, static keys) panics on int3.
        """
        if self._settings.qemu == "host":
            return [QEMU]
        root = RootBuilder(self._settings, SUITES["trixie"], self._tell).find_root()
        if root is None:
            raise LabError("Debian 13's QEMU is not there: `scripts/lab build trixie-kvm` first")
        words = [str(root / "lib64/ld-linux-x86-64.so.2")]
        words += ["--library-path", str(root / "usr/lib/x86_64-linux-gnu")]
        words += [str(root / "usr/bin" / QEMU)]
        return [*words, *(word for one in FIRMWARE for word in ("-L", str(root / one)))]

    def _wait_until_up(self, child: subprocess.Popen[bytes], running: Running) -> None:
        limit = time.monotonic() + BOOT_S * running.scale
        channel = self._first_answer(child, limit)
        with channel:
            try:
                state = channel.run(
                    ["systemctl", "is-system-running", "--wait"],
                    deadline_s=max(1.0, limit - time.monotonic()),
                )
            except LabError as error:
                raise self._not_up(str(error)) from error
            if state.stdout.strip() != b"running":
                failed = channel.run(
                    ["systemctl", "--failed", "--plain", "--no-legend"],
                    deadline_s=ANSWER_S * running.scale,
                ).stdout.decode()
                raise self._not_up(f"system state is {state.stdout.decode().strip()}:\n{failed}")

    def _first_answer(self, child: subprocess.Popen[bytes], limit: float) -> Channel:
        while True:
            if child.poll() is not None:
                log = process.tail(self.folder / "qemu.log")
                raise self._not_up(f"QEMU ended with {child.returncode}: {log}")
            if time.monotonic() > limit:
                raise self._not_up("its agent did not answer in time")
            try:
                return Channel.connect(self.folder, deadline_s=2)
            except DeadlineError:
                continue
            except LabError:
                time.sleep(0.2)

    def _not_up(self, reason: str) -> NotUpError:
        return NotUpError(
            f"{self.flavour.name} did not come up: {reason}", console=process.tail(self.console)
        )


def machines(settings: Settings, tell: Tell) -> list[Machine]:
    """Return the machine of each flavour, running or not."""
    return [Machine(settings, flavour, tell) for flavour in FLAVOURS.values()]
