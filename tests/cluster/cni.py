#!/usr/bin/python3
"""A network plugin for pods that are not in the host's network: loopback, and the API server.

Whatever a pod sends to the API server's address is passed on; nothing else is reachable, and no
interface of this machine is made or changed. tests/cluster/realnode.py installs this file under two
names: `loopback`, which containerd always calls, and `apiserver`, whose configuration names the
address. Source of the protocol: the CNI specification, 1.0.0.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

VERSION = "1.0.0"
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def main() -> None:
    """Answer one call of the runtime, or pass connections on."""
    if sys.argv[1:2] == ["relay"]:
        relay(*sys.argv[2:])
        return
    command, network = os.environ["CNI_COMMAND"], json.load(sys.stdin)
    answer: dict[str, object] = {"cniVersion": VERSION}
    if command == "VERSION":
        answer["supportedVersions"] = ["0.3.1", "0.4.0", VERSION]
    elif command == "ADD":
        name, space = os.environ["CNI_IFNAME"], os.environ["CNI_NETNS"]
        if "address" in network:
            start_relay(space, network["address"])
        else:
            loopback_up(space)
        answer["interfaces"] = [{"name": name, "sandbox": space}]
        answer["ips"] = [{"address": "127.0.0.1/8", "interface": 0}]
    print(json.dumps(answer))


def start_relay(space: str, address: str) -> None:
    """Start a process that passes connections on, and wait until it listens."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__)), "relay", space, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the runtime waits for the end of its own pipe
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.returncode = 0  # it lives on, and ends with containerd's place


def loopback_up(space: str) -> None:
    """Bring a network namespace's loopback interface up."""
    with entered(space, socket.SOCK_DGRAM) as one:
        name = b"lo".ljust(16, b"\0")
        request = struct.pack("16sh14x", name, 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(one, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(one, SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | IFF_UP))


def entered(space: str, kind: int) -> socket.socket:
    """Return a socket of another network namespace."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(space, os.O_RDONLY)
    change: Callable[[int, int], None] = getattr(os, "setns")  # noqa: B009 - from Python 3.12 on
    change(there, CLONE_NEWNET)
    made = socket.socket(socket.AF_INET, kind)
    change(here, CLONE_NEWNET)
    os.close(here)
    os.close(there)
    return made


def relay(space: str, address: str) -> None:
    """Listen in a pod's namespace, connect in this one."""
    loopback_up(space)
    host, _, port = address.rpartition(":")
    with entered(space, socket.SOCK_STREAM) as listening:
        listening.bind((host, int(port)))
        listening.listen()
        print("listening", flush=True)
        while True:
            accepted, _ = listening.accept()
            outgoing = socket.create_connection((host, int(port)))
            for pair in ((accepted, outgoing), (outgoing, accepted)):
                threading.Thread(target=copy, args=pair, daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until one side ends."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


if __name__ == "__main__":
    main()
