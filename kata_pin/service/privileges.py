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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

import kata_pin.rights.broker
from kata_pin.base.config.alloc import UNIX
from kata_pin.base.config.tree import Config, NewThreads, NriEnabled
from kata_pin.base.errors import DaemonError, reason_of
from kata_pin.base.settings import MemoryMode
from kata_pin.peers.kata import read_kata_configs
from kata_pin.rights.broker.libc import CAP_DAC_READ_SEARCH, libc
from kata_pin.rights.broker.policy import VmmPolicy
from kata_pin.rights.broker.protocol import ANSWER, AffinityChange, Changed, Settings
from kata_pin.rights.calls import Calls
from kata_pin.rights.client import BrokerCalls
from kata_pin.service.runtime_dir import hand_over
from kata_pin.vmm.checks import DEFAULT_EXECUTABLES, DEFAULT_SHIMS
from kata_pin.vmm.kinds import kinds_for, vcpu_names

log = logging.getLogger(__name__)


NOBODY: Final = 65534
"""The user and group of a node that has no user of our own (overflowuid of every Linux)."""

START_S: Final = 60.0
"""How long a broker may take to start; its unit waits 300 s. One that ends is noticed at once.

Starting again costs an overloaded node more than waiting: an interpreter can take many seconds.
"""

END_S: Final = 1.0
EXIT_S: Final = 0.2
"""How long a broker takes to exit once its channel has ended; one that was stopped never does."""


class Broker(Struct, frozen=True):
    """The running broker and the calls that it makes."""

    process: subprocess.Popen[bytes]
    calls: BrokerCalls

    async def watch(self) -> None:
        """Wait until it ends, and raise DaemonError: nothing works without it."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        self.calls.on_end = wake
        fd = os.pidfd_open(self.process.pid)
        try:
            loop.add_reader(fd, ended.set)
            if not self.calls.ended.is_set():
                await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        try:
            status = self.process.wait(EXIT_S)
            how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            how = "does not answer"
        raise DaemonError(
            f"the privileged broker (pid {self.process.pid}) {how}",
            hint="the daemon cannot work without it; systemd starts both again",
        )


@contextlib.contextmanager
def brokered(config: Config) -> Iterator[Broker]:
    """Run the broker for the block; raises DaemonError where it does not start."""
    broker = _start(_settings(config))
    try:
        yield broker
    finally:
        broker.calls.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed any more
            broker.process.wait(END_S)


def _start(settings: Settings) -> Broker:
    """Start the broker; DaemonError where it does not answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = str(Path(kata_pin.rights.broker.__file__).with_name("__main__.py"))
        process = subprocess.Popen(
            [sys.executable, "-IS", program, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
    try:
        ours.settimeout(START_S)
        ours.send(settings.pack())
        if ours.recv(ANSWER.size) != ANSWER.pack(0, 0):
            raise DaemonError("the privileged broker could not start")
        return Broker(process, BrokerCalls(ours, settings))
    except BaseException as error:
        ours.close()
        process.kill()
        process.wait()
        if isinstance(error, OSError):
            raise DaemonError(
                f"the privileged broker does not answer: {reason_of(error)}"
            ) from error
        raise


def _settings(config: Config) -> Settings:
    """Return what the broker may touch, and what is switched on (docs/broker.md).

    Kata's configuration files are the administrator's, as our own is: files of anybody else are
    refused unread.
    """
    files = read_kata_configs(config.paths.kata_configs)
    configured = [path for file in files for one in file.configs for path in one.binaries]
    paths, alloc = config.paths, config.alloc
    vmms = (*DEFAULT_EXECUTABLES, *config.hypervisors, *configured)
    return Settings(
        vmms=vmms,
        shims=(*DEFAULT_SHIMS, *config.shims),
        vc=paths.vc,
        kata=paths.kata,
        cdi=paths.cdi,
        debugfs=paths.debugfs,
        kubelet_state=paths.kubelet_state,
        bundle_roots=paths.bundle_roots,
        nri="" if config.nri.enabled is NriEnabled.NO else config.nri.socket,
        cri=alloc.cri,
        pods=alloc.pods_url.removeprefix(UNIX) if alloc.pods_url.startswith(UNIX) else "",
        qmp=config.qmp.enabled,
        thread_events=config.new_threads is not NewThreads.AUDIT,
        rt=vcpu_names(kinds_for(vmms)) if config.rt.priority else (),
        quiet=config.quiet.value if config.quiet.acts else "",
        resctrl=config.resctrl.enabled,
        memory=config.memory is MemoryMode.MIGRATE,
        classes=tuple(config.resctrl.classes.items()) if config.resctrl.enabled else (),
    )


def give_up(config: Config) -> None:
    """Give up all capabilities, for good; as root become the unprivileged user first.

    From then on no other process of that user may look into this one.

    Raises DaemonError where that is refused, OSError where the runtime directory cannot be made.
    """
    try:
        if os.geteuid() == 0:
            _become(config)
        libc().keep_rights(_kept(config))
        libc().hide()
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


def _become(config: Config) -> None:
    """Become the unprivileged user, who gets the runtime directory; raises OSError."""
    try:
        uid, gid = pwd.getpwnam(config.user)[2:4]
    except KeyError:
        uid = gid = NOBODY
        log.warning(
            "no user %s: the daemon runs as uid %d, as other services may; create the user, "
            "or set `user` to another one",
            config.user,
            uid,
        )
    hand_over(config.runtime_dir, uid, gid)
    os.setgroups(_groups(config.group))
    os.setresgid(gid, gid, gid)
    libc().keep_permitted()
    os.setresuid(uid, uid, uid)


def _groups(name: str) -> list[int]:
    """Return the group whose members may read: its sockets are given to it."""
    try:
        return [grp.getgrnam(name).gr_gid]
    except KeyError:
        return []


# The calls of commands that root runs without a daemon: threads as the broker would change them.
#
# What is recorded of threads comes from files of the daemon's user, who must not have root change
# processes of others by them.


class CheckedCalls(Calls):
    """Makes the calls in this process, and refuses the threads that the broker refuses."""

    def __init__(self, config: Config) -> None:
        self._policy = VmmPolicy(_settings(config))

    def set_affinities(self, changes: Sequence[AffinityChange], proc: str) -> list[Changed]:
        """See Calls."""
        return self._permitted(changes, lambda those: Calls.set_affinities(self, those, proc))

    def set_classes(
        self, changes: Sequence[AffinityChange], policy: int, priority: int, proc: str
    ) -> list[Changed]:
        """See Calls."""
        given = policy, priority, proc
        return self._permitted(changes, lambda those: Calls.set_classes(self, those, *given))

    def join_group(
        self, class_name: str, name: str, threads: Sequence[AffinityChange]
    ) -> list[Changed]:
        """See Calls."""
        group = class_name, name
        return self._permitted(threads, lambda those: Calls.join_group(self, *group, those))

    def _permitted(
        self,
        changes: Sequence[AffinityChange],
        change: Callable[[Sequence[AffinityChange]], list[Changed]],
    ) -> list[Changed]:
        refused = {tgid: self._policy.refusal(tgid) for tgid in {one.tgid for one in changes}}
        done = iter(change([one for one in changes if not refused[one.tgid]]))
        return [Changed(refused[one.tgid]) if refused[one.tgid] else next(done) for one in changes]
