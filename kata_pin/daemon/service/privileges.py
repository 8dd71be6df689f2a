"""Giving up rights before anything hostile is parsed: the broker keeps what must be kept (D23).

The service's unit starts the daemon as an unprivileged user with the capabilities that its broker
needs: the broker inherits them, and the daemon clears its own. Started by root it also makes the
runtime directory ready for the user that it becomes. Without any rights, both work as far as that
goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kata_pin.broker
from kata_pin.broker.libc import CAP_DAC_READ_SEARCH, libc
from kata_pin.broker.protocol import ANSWER
from kata_pin.config.alloc import UNIX
from kata_pin.config.tree import Config
from kata_pin.daemon.service.runtime_dir import hand_over
from kata_pin.errors import DaemonError, reason_of
from kata_pin.host.broker_calls import BrokerCalls
from kata_pin.sources.kata_config import read_kata_configs
from kata_pin.vmm.allow_list import DEFAULT_EXECUTABLES, DEFAULT_SHIMS

log = logging.getLogger(__name__)

NOBODY: Final = 65534
"""The user and group of a node that has no user of our own (overflowuid of every Linux)."""

START_S: Final = 10.0
END_S: Final = 5.0

_RUNTIME_DIRS_OF_USERS: Final = "/run/user"  # where rootless VMMs listen


@dataclass(frozen=True)
class Account:
    """An unprivileged user; `named` is false for the one that stands in for a missing one."""

    uid: int
    gid: int
    named: bool = True


def account(name: str) -> Account:
    """Return the user that the daemon becomes: the one of that name, else nobody."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return Account(NOBODY, NOBODY, named=False)
    return Account(found.pw_uid, found.pw_gid)


@dataclass(frozen=True)
class Broker:
    """The running broker and the calls that it makes."""

    process: subprocess.Popen[bytes]
    calls: BrokerCalls

    async def watch(self) -> None:
        """Wait until it ends, and raise DaemonError: nothing works without it."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        fd = os.pidfd_open(self.process.pid)
        try:
            loop.add_reader(fd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        status = self.process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise DaemonError(
            f"the privileged broker (pid {self.process.pid}) ended {how}",
            hint="the daemon cannot work without it; systemd starts both again",
        )


@contextlib.contextmanager
def brokered(config: Config) -> Iterator[Broker]:
    """Run the broker for the block; raises DaemonError where it does not start."""
    broker = _start(_rules(config))
    try:
        yield broker
    finally:
        broker.calls.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed any more
            broker.process.wait(END_S)


def _start(rules: Iterable[str]) -> Broker:
    """Start the broker; DaemonError where it does not answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = str(Path(kata_pin.broker.__file__).with_name("__main__.py"))
        process = subprocess.Popen(
            [sys.executable, "-IS", program, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
    try:
        ours.settimeout(START_S)
        ours.send(b"\0".join(map(os.fsencode, rules)))
        if ours.recv(ANSWER.size) != ANSWER.pack(0, 0):
            raise DaemonError("the privileged broker could not start")
        return Broker(process, BrokerCalls(ours))
    except BaseException as error:
        ours.close()
        process.kill()
        process.wait()
        if isinstance(error, OSError):
            raise DaemonError(
                f"the privileged broker does not answer: {reason_of(error)}"
            ) from error
        raise


def _rules(config: Config) -> Iterator[str]:
    """Yield what the broker may touch (docs/broker.md).

    Kata's configuration files are the administrator's, as our own is: files of anybody else are
    refused unread.
    """
    files = read_kata_configs(config.paths.kata_configs)
    configured = [path for file in files for one in file.configs for path in one.binaries]
    for path in (*DEFAULT_EXECUTABLES, *config.hypervisors, *configured):
        yield f"x{path}"
    for path in (*DEFAULT_SHIMS, *config.shims):
        yield f"s{path}"
    paths = config.paths
    for folder in (paths.vc, paths.kata, paths.cdi, f"{paths.debugfs}/kvm", *paths.bundle_roots):
        yield f"f{folder}"
    for folder in (paths.vc, paths.kata):
        yield f"j{folder}"
    yield f"i{paths.kubelet_state}"
    yield f"u{_RUNTIME_DIRS_OF_USERS}"
    for name, schemata in config.resctrl.classes.items():
        yield f"q{name} {schemata}"
    alloc = config.alloc
    pods = alloc.pods_url.removeprefix(UNIX) if alloc.pods_url.startswith(UNIX) else ""
    for path in filter(None, (config.nri.socket, alloc.cri, pods)):
        yield f"c{path}"


def give_up(config: Config) -> None:
    """Give up all capabilities, for good; as root become the unprivileged user first.

    Raises DaemonError where that is refused, OSError where the runtime directory cannot be made.
    """
    try:
        if os.geteuid() == 0:
            _become(account(config.user), config)
        libc().keep_rights(_kept(config))
    except OSError as error:
        raise DaemonError(
            f"cannot give up root's rights: {reason_of(error)}",
            hint="started as root, kata-pin run needs CAP_SETUID, CAP_SETGID and CAP_CHOWN",
        ) from error


def _kept(config: Config) -> tuple[int, ...]:
    """Return the capabilities that the daemon keeps: one, where it must read a kubelet's secrets.

    They are files behind links that the kubelet replaces, and OpenSSL opens them itself.
    """
    secrets = config.alloc.pods_token or config.alloc.pods_certificate
    return (CAP_DAC_READ_SEARCH,) if secrets else ()


def _become(user: Account, config: Config) -> None:
    """Become a user, who gets the runtime directory; raises OSError."""
    if not user.named:
        log.warning(
            "no user %s: the daemon runs as uid %d, as other services may; create the user, "
            "or set `user` to another one",
            config.user,
            user.uid,
        )
    hand_over(config.runtime_dir, user.uid, user.gid)
    os.setgroups(_groups(config.group))
    os.setresgid(user.gid, user.gid, user.gid)
    libc().keep_permitted()
    os.setresuid(user.uid, user.uid, user.uid)


def _groups(name: str) -> list[int]:
    """Return the group whose members may read: its sockets are given to it."""
    try:
        return [grp.getgrnam(name).gr_gid]
    except KeyError:
        return []
