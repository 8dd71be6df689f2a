"""QEMU's command line, in the order and with the words recorded from Kata 3.21 and runtime-rs 4.1.

What differs, and why: README.md. Everything here is a value: nothing is opened or started.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from tests.e2e.minikata.devices import Devices
from tests.e2e.minikata.settings import Settings
from tests.support.shim import QMP_FD

VIRTIOFSD: Final = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")
"""Debian 13's, written in Rust, and Debian 12's, written in C."""

_APPEND: Final = (
    "tsc=reliable no_timer_check rcupdate.rcu_expedited=1 i8042.direct=1 i8042.dumbkbd=1 "
    "i8042.nopnp=1 i8042.noaux=1 noreplace-smp reboot=k cryptomgr.notests net.ifnames=0 "
    "pci=lastbus=0 console=hvc0 console=hvc1 quiet panic=1 nr_cpus={maximum} selinux=0 "
    "scsi_mod.scan=none mitigations=off"
)


class Places(NamedTuple):
    """Where the files of one VM are."""

    console: str
    console_log: str
    file_server: str
    extra_monitor: str
    pidfile: str
    shared: str


class Machine(NamedTuple):
    """What one VM is made of."""

    sandbox: str
    uuid: str
    settings: Settings
    places: Places
    accel: str
    iothread: str
    mac: str
    char: str


def accel(setting: str) -> str:
    """Return the accelerator: KVM where this process may use it."""
    if setting != "auto":
        return setting
    return "kvm" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "tcg"


def command_line(machine: Machine, devices: Devices, *, file_server: bool) -> list[str]:
    """Return QEMU's arguments; the number of the QMP listener is left to the starter."""
    settings, places = machine.settings, machine.places
    if not settings.go:
        return _rs_command_line(machine, devices, file_server=file_server)
    naming = ",debug-threads=on" if settings.enable_debug else ""
    argv = [settings.hypervisor, "-name", f"sandbox-{machine.sandbox}{naming}"]
    argv += ["-uuid", machine.uuid, "-machine", f"q35,accel={machine.accel}"]
    argv += ["-cpu", f"host,{settings.cpu_features}" if machine.accel == "kvm" else "max"]
    argv += ["-qmp", f"unix:fd={QMP_FD},server=on,wait=off"]
    if settings.enable_debug and settings.extra_monitor_socket:
        argv += ["-qmp", f"unix:path={places.extra_monitor},server=on,wait=off"]
    memory = settings.default_memory
    argv += ["-m", f"{memory}M,slots=10,maxmem={memory + 4608}M"]
    argv += _console_and_disks(machine)
    argv += _vsock(devices)
    if file_server:
        argv += ["-chardev", f"socket,id={machine.char},path={places.file_server}", "-device"]
        argv += [f"vhost-user-fs-pci,chardev={machine.char},tag=kataShared,queue-size=1024"]
    argv += _network(machine, devices)
    argv += ["-rtc", "base=utc,driftfix=slew,clock=host"]
    argv += ["-global", "kvm-pit.lost_tick_policy=discard"] if machine.accel == "kvm" else []
    argv += ["-vga", "none", "-no-user-config", "-nodefaults", "-nographic", "--no-reboot"]
    backend = f"memory-backend-file,id=dimm1,size={memory}M,mem-path=/dev/shm,share=on"
    argv += ["-object", backend, "-numa", "node,memdev=dimm1"]
    argv += _guest(settings)
    if machine.iothread:
        argv += ["-object", f"iothread,id={machine.iothread}"]
    return [*argv, "-pidfile", places.pidfile, "-smp", _smp(settings)]


def _rs_command_line(machine: Machine, devices: Devices, *, file_server: bool) -> list[str]:
    """Return QEMU's arguments in the order of runtime-rs 4.1; it names no vCPUs beyond its boot's
    unless there may be more."""
    settings, places = machine.settings, machine.places
    naming = ",debug-threads=on" if settings.enable_debug else ""
    argv = [settings.hypervisor, "-name", f"sandbox-{machine.sandbox}{naming}", *_guest(settings)]
    argv += ["-smp", _smp(settings)]
    irqchip = "kernel_irqchip=on," if machine.accel == "kvm" else ""
    backend = "entire-guest-memory-share"
    argv += ["-machine", f"q35,accel={machine.accel},{irqchip}memory-backend={backend}"]
    argv += ["-cpu", f"host,{settings.cpu_features}" if machine.accel == "kvm" else "max"]
    memory = settings.default_memory
    argv += ["-m", f"{memory}M,slots=10,maxmem={memory + 4608}M"]
    size = f"mem-path=/dev/shm,size={memory}M,share=on,prealloc=off,readonly=off"
    argv += ["-object", f"memory-backend-file,id={backend},{size}"]
    argv += ["-qmp", f"unix:fd={QMP_FD},server=on,wait=off"]
    argv += ["-rtc", "base=utc,clock=host,driftfix=slew"]
    argv += [*_rs_disks(machine), *_vsock(devices), *_network(machine, devices)]
    if file_server:
        argv += ["-chardev", f"socket,id=virtiofsd-chardev,path={places.file_server}", "-device"]
        argv += ["vhost-user-fs-pci,chardev=virtiofsd-chardev,tag=kataShared,queue-size=1024"]
    console = f"socket,id=charconsole0,server=on,wait=off,path={places.console}"
    console += _console_log(machine)
    argv += ["-device", "virtio-serial-pci,id=serial0"]
    argv += ["-device", "virtconsole,id=console0,chardev=charconsole0", "-chardev", console]
    return [*argv, "-vga", "none", "-no-user-config", "-nodefaults", "-nographic", "-no-reboot"]


def _rs_disks(machine: Machine) -> list[str]:
    bridge = "pci-bridge,bus=pcie.0,id=pci-bridge-0,chassis_nr=1,shpc=off,addr=2"
    disks = "virtio-scsi-pci,id=scsi0,disable-modern=true"
    iothread = ["-object", f"iothread,id={machine.iothread}"] if machine.iothread else []
    return [
        *("-object", "rng-random,id=rng0,filename=/dev/urandom"),
        *("-device", "virtio-rng-pci,rng=rng0"),
        *("-device", f"{bridge},io-reserve=4k,mem-reserve=1m,pref64-reserve=1m"),
        *iothread,
        *("-device", f"{disks},iothread={machine.iothread}" if machine.iothread else disks),
    ]


def file_server_command(shared: str, socket: int) -> list[str]:
    """Return virtiofsd's arguments for a listener that it inherits, empty if there is none."""
    program = next((path for path in VIRTIOFSD if os.path.exists(path)), "")
    if not program:
        return []
    log = ["--syslog"] if os.path.exists("/dev/log") else []  # the one in C ends without it
    if program == VIRTIOFSD[0]:
        return [program, *log, "--cache=auto", f"--shared-dir={shared}", f"--fd={socket}",
                "--thread-pool-size=1", "--announce-submounts"]  # fmt: skip
    return [program, *log, "-o", "cache=auto", "-o", f"source={shared}", f"--fd={socket}",
            "--thread-pool-size=1", "-o", "announce_submounts"]  # fmt: skip


def _console_and_disks(machine: Machine) -> list[str]:
    console = f"socket,id=charconsole0,path={machine.places.console},server=on,wait=off"
    console += _console_log(machine)
    disks = "virtio-scsi-pci,id=scsi0,disable-modern=true"
    if machine.iothread:
        disks += f",iothread={machine.iothread}"
    bridge = "pci-bridge,bus=pcie.0,id=pci-bridge-0,chassis_nr=1,shpc=off,addr=2"
    return [
        *("-device", f"{bridge},io-reserve=4k,mem-reserve=1m,pref64-reserve=1m"),
        *("-device", "virtio-serial-pci,disable-modern=true,id=serial0"),
        *("-device", "virtconsole,chardev=charconsole0,id=console0", "-chardev", console),
        *("-device", disks),
        *("-object", "rng-random,id=rng0,filename=/dev/urandom"),
        *("-device", "virtio-rng-pci,rng=rng0"),
    ]


def _console_log(machine: Machine) -> str:
    """Have a guest that says something heard after its end."""
    linux = machine.settings.guest == "linux"
    return f",logfile={machine.places.console_log}" if linux else ""


def _vsock(devices: Devices) -> list[str]:
    if not devices.cid:
        return []
    ends = f"vhostfd={devices.vsock},id=vsock-{devices.cid},guest-cid={devices.cid}"
    return ["-device", f"vhost-vsock-pci,disable-modern=true,{ends}"]


def _network(machine: Machine, devices: Devices) -> list[str]:
    if not devices.taps:
        return []
    go = machine.settings.go
    name, driver = ("network-0", "driver=") if go else ("network-tap0_kata", "")
    vhost = f"vhost=on,vhostfds={_numbers(devices.vhost)}," if devices.vhost else ""
    card = f"{driver}virtio-net-pci,netdev={name},mac={machine.mac},disable-modern=true"
    return [
        *("-netdev", f"tap,id={name},{vhost}fds={_numbers(devices.taps)}"),
        *("-device", f"{card},mq=on,vectors={2 * len(devices.taps) + 2}"),
    ]


def _guest(settings: Settings) -> list[str]:
    if settings.guest == "idle":
        return ["-bios", settings.firmware]
    append = _APPEND.format(maximum=settings.maximum)
    return ["-kernel", settings.kernel, "-initrd", settings.initrd, "-append", append]


def _smp(settings: Settings) -> str:
    maximum = settings.maximum
    if settings.go:
        return f"{settings.default_vcpus},cores=1,threads=1,sockets={maximum},maxcpus={maximum}"
    more = f",maxcpus={maximum}" if maximum > settings.default_vcpus else ""
    return f"{settings.default_vcpus}{more}"


def _numbers(descriptors: list[int]) -> str:
    return ":".join(map(str, descriptors))
