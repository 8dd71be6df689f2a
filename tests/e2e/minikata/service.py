"""The long-lived process of one sandbox, where Kata has its shim: QEMU's parent, QMP's holder.

Started by client.py under the shim's name with a listening socket as descriptor 3. One thread
accepts and watches the placeholders, the other does all the work, one command after the other. It
ends when the sandbox is deleted, or could not be created; killed, it leaves QEMU an orphan.
HOME (--home) is ROOT/<sandbox>: s, the socket, and nothing else; see ledger.py.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import sys
import threading
from typing import Any, Final

sys.path.insert(0, os.path.realpath(f"{os.path.dirname(__file__)}/../../.."))

from tests.e2e.minikata import settings as settings_module
from tests.e2e.minikata.container import Container
from tests.e2e.minikata.hooks import HookError
from tests.e2e.minikata.ledger import Ledger
from tests.e2e.minikata.pinning import PanicError
from tests.e2e.minikata.runtime_rs import RsSandbox
from tests.e2e.minikata.sandbox import Refused, Sandbox

LISTENER: Final = 3
PANIC_STATUS: Final = 2

_OPTIONS: Final = {
    "cpuset-cpus": "cpus",
    "cpuset-mems": "mems",
    "cpu-quota": "quota",
    "cpu-period": "period",
    "cpu-share": "shares",
}

Work = socket.socket | str
"""A connection with a command, or the name of a container whose placeholder exited."""


class Service:
    """Takes commands for one sandbox; `answer` runs in the working thread."""

    def __init__(self, home: str, config: str) -> None:
        self._ledger = Ledger(home)
        self._config = config
        self._sandbox: Sandbox | None = None
        self._poll = select.poll()
        self._watched: dict[int, str] = {}
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve for ever; the working thread ends the process."""
        listener = socket.socket(fileno=LISTENER)
        self._poll.register(listener, select.POLLIN)
        threading.Thread(target=self._do_work, daemon=True).start()
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == LISTENER:
                    self._work.put(listener.accept()[0])
                else:
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
                    self._work.put(self._watched.pop(descriptor))

    def _do_work(self) -> None:
        try:
            while True:
                work = self._work.get()
                if isinstance(work, str):
                    if self._sandbox is not None:
                        self._sandbox.exited(work)
                    continue
                with work:
                    ends = self._serve(work)
                if ends:
                    os._exit(0)
        except BaseException as error:
            self._ledger.say(f"panic: {type(error).__name__}: {error}")
            os._exit(PANIC_STATUS)

    def _serve(self, connection: socket.socket) -> bool:
        """Answer one command; return whether the service ends with it."""
        (verb, name, *arguments), lifeline = _receive(connection)
        self._ledger.say(" ".join((verb, name, *arguments[:1])))
        fails = ends = False
        try:
            if verb == "create":
                output = self._create(name, arguments[0], int(arguments[1]), lifeline)
            else:
                output = self._answer(verb, name, arguments)
            ends = verb == "delete" and name == self._the_sandbox.id
        except PanicError as error:
            self._ledger.say(f"panic: {error}")  # before the caller sees its connection closed
            os._exit(PANIC_STATUS)
        except (Refused, HookError, RuntimeError, OSError, ValueError, KeyError) as error:
            fails, output = True, str(error)
            self._ledger.say(f"{verb} {name}: {type(error).__name__}: {error}")
            ends = verb == "create" and self._sandbox is None
        if ends:
            self._remove_home()
        try:
            connection.sendall(("1" if fails else "0").encode() + output.encode())
        except OSError as error:
            self._ledger.say(f"{verb} {name}: the caller is gone: {error}")
        return ends

    def _answer(self, verb: str, name: str, arguments: list[str]) -> str:
        sandbox = self._the_sandbox
        if verb == "start":
            sandbox.start(name)
        elif verb == "kill":
            sandbox.kill(name, _signal(arguments[0]))
        elif verb == "delete":
            sandbox.delete(name, force=arguments[0] == "force")
        elif verb == "update":
            sandbox.update(name, _cpu(arguments[0], arguments[1:]))
        elif verb == "state":
            return json.dumps(sandbox.state(name), indent=2)
        elif verb == "ps":
            return json.dumps([sandbox.container(name).placeholder])
        elif verb == "events":
            sandbox.container(name)
            return json.dumps({"type": "stats", "id": name, "data": {}})
        return ""

    @property
    def _the_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise Refused("the sandbox does not exist")
        return self._sandbox

    def _create(self, name: str, bundle: str, placeholder: int, lifeline: int) -> str:
        container = Container(name, bundle, placeholder, lifeline)
        if self._sandbox is None:
            settings = settings_module.read(self._config, container.annotations)
            kind = Sandbox if settings.go else RsSandbox
            self._ledger.note_process(os.getpid())
            sandbox = kind(container, settings, self._ledger)
            sandbox.create_sandbox()
            self._sandbox = sandbox
        else:
            self._sandbox.create(container)
        self._ledger.note_process(placeholder)
        descriptor = os.pidfd_open(placeholder)
        self._watched[descriptor] = name
        self._poll.register(descriptor, select.POLLIN)
        return ""

    def _remove_home(self) -> None:
        home = self._ledger.home
        for entry in os.listdir(home):
            os.unlink(f"{home}/{entry}")
        os.rmdir(home)


def _receive(connection: socket.socket) -> tuple[list[str], int]:
    """Return the fields of a command, and the lifeline that came with it or -1."""
    text, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
    while part := connection.recv(65536):
        text += part
    return text.lstrip(b"\0").decode().split("\0"), descriptors[0] if descriptors else -1


def _signal(text: str) -> int:
    """Return a signal's number from its number or name, with SIG or without."""
    if text.isdigit():
        return int(text)
    return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]


def _cpu(resources: str, options: list[str]) -> dict[str, Any]:
    """Return the CPU part of an update, from LinuxResources as JSON and from options."""
    cpu: dict[str, Any] = {}
    if resources:
        cpu.update(json.loads(resources).get("cpu") or {})
    for option in options:
        name, _, value = option.partition("=")
        cpu[_OPTIONS[name]] = value if name.startswith("cpuset") else int(value)
    return cpu


def main(arguments: list[str]) -> None:
    """Serve the sandbox that the command line names."""
    named = dict(word[2:].partition("=")[::2] for word in arguments if word.startswith("--"))
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write("containerd-shim")
    Service(named["home"], named["config"]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
