"""The tunables of the node, and how they are read and written."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import ECONNREFUSED, EINVAL, EIO, ENOENT, ESRCH
from typing import Final

from kata_pin.base.config.tree import LiveConfig
from kata_pin.base.cpuset import CpuSet, HostTopology
from kata_pin.base.errors import HostError, ParseError, reason_of
from kata_pin.engine.counters import Slices
from kata_pin.linux.files import HostRoot
from kata_pin.linux.proc import parse_mask
from kata_pin.linux.tasks import starttime
from kata_pin.linux.topology import online
from kata_pin.options.quiet.decide import (
    full_goals,
    idle_limits,
    idle_value,
    power_goals,
    power_problems,
    wanted_power,
)
from kata_pin.options.quiet.read import (
    device_names,
    kernel_threads,
    read_idle_limit,
    read_policies,
    read_queues,
)
from kata_pin.options.quiet.services import MAX_BYTES, Setup, cpu_list, mask, parse_setup
from kata_pin.options.quiet.tuner import Written
from kata_pin.options.quiet.values import (
    NO_CPU,
    FrequencyPolicy,
    Goal,
    Observed,
    PowerGoals,
    QuietClaim,
    QuietState,
    TunableKey,
    TunableRecord,
    Unknown,
)
from kata_pin.rights.broker.tunables import (
    CPU_LIST,
    CPU_MASK,
    OF_INTERRUPTS,
    TUNABLE_FILES,
    TunableKind,
    TunableWrite,
    TunableWritten,
)

# irqbalance as a tunable: which pCPUs it keeps clear of interrupts.
#
# It is asked over its own socket, so no file of its is edited and it is not restarted. A ban holds
# from its next round on, some seconds later, and is lost with the process; another process is
# another tunable. Facts are in irqbalance.c, sock_handle; `settings cpus` replaces all earlier
# bans.

FOLDER: Final = "/run/irqbalance"
ANSWER_S: Final = 1.0
MOST: Final = 8
"""Most sockets that are asked; there is one irqbalance per node."""

ROUNDS: Final = 3
"""Rounds of irqbalance after which a ban that does not show was not taken."""

_SOCKET: Final = re.compile(r"irqbalance([1-9][0-9]{0,9})\.sock\Z")


class IrqbalanceProcesses:
    """The irqbalance processes of this node that can be reached."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._sent: dict[str, tuple[str, float]] = {}
        """Lists that were sent and do not show yet, and until when that is no wonder."""
        self._sleep_s: dict[str, int] = {}
        self._given_back: set[str] = set()
        self._unanswered: dict[int, socket.socket] = {}
        self.problem = ""
        """Why one cannot be asked; empty where all is well, or there is none."""
        self.running: tuple[int, ...] = ()

    async def observe(self) -> list[Observed]:
        """Return each with the pCPUs that it keeps clear; one that is yet to act is left out."""
        found = []
        self.problem = ""
        pids = self._pids()
        for pid in pids:
            try:
                identity = str(starttime(self._root, pid, pid))
                setup = await self._setup(pid)
            except (OSError, HostError, ParseError) as error:  # TimeoutError is an OSError
                if _is_gone(error):
                    continue
                self.problem = f"irqbalance (pid {pid}) does not answer: {reason_of(error)}"
                continue
            one = Observed(
                TunableKey(TunableKind.IRQBALANCE, str(pid)), identity, str(setup.banned),
                f"irqbalance (pid {pid})",
            )  # fmt: skip
            self._sleep_s[one.key.name] = setup.sleep_s
            if not self._is_pending(one):
                found.append(one)
        self.running = tuple(pids)
        self._sent = {name: one for name, one in self._sent.items() if int(name) in pids}
        for gone in self._unanswered.keys() - pids:
            self._unanswered.pop(gone).close()
        return found

    async def write(self, writes: Sequence[TunableRecord]) -> list[Written]:
        """Tell each which pCPUs to keep clear; what comes of it shows later."""
        return [await self._tell(one) for one in writes]

    def _pids(self) -> list[int]:
        try:
            names = self._root.calls.listdir(self._root.path(FOLDER))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problem = f"cannot read {FOLDER}: {reason_of(error)}"
            return []
        found = [int(match[1]) for match in map(_SOCKET.match, names) if match]
        return sorted(found)[:MOST]

    def _is_pending(self, one: Observed) -> bool:
        """Return whether a list that was sent does not show yet."""
        value, until = self._sent.get(one.key.name, ("", 0.0))
        if one.value == value or time.monotonic() > until:
            self._sent.pop(one.key.name, None)
            return False
        return True

    async def _setup(self, pid: int) -> Setup:
        """Return its setup. An answer that is late is read the next time, over the same connection:

        irqbalance writes without MSG_NOSIGNAL, so one that answers into a closed one is ended.
        """
        end = self._unanswered.pop(pid, None) or self._root.calls.ask_irqbalance(pid, None)
        end.settimeout(0)
        answer = b""
        try:
            async with asyncio.timeout(ANSWER_S):
                while b"BANNED" not in answer and len(answer) < MAX_BYTES:
                    more = await asyncio.get_running_loop().sock_recv(end, MAX_BYTES)
                    if not more:
                        break
                    answer += more
        except TimeoutError:
            self._unanswered[pid] = end
            raise
        except BaseException:
            end.close()
            raise
        end.close()
        return parse_setup(answer)

    async def _tell(self, one: TunableRecord) -> Written:
        """Send a list; the first time that the first one is given back, its own configuration."""
        name = one.key.name
        own = one.written == one.first and name not in self._given_back
        banned = "" if own else one.written
        (self._given_back.add if own else self._given_back.discard)(name)
        try:
            end: socket.socket = self._root.calls.ask_irqbalance(int(name), banned)
        except OSError as error:
            return Written(ENOENT if _is_gone(error) else error.errno or EINVAL)
        end.close()
        until = time.monotonic() + ROUNDS * self._sleep_s.get(name, 10) + 2
        self._sent[name] = one.written, until
        return Written(0)


def _is_gone(error: Exception) -> bool:
    """Return whether there is no such process any more, only its socket."""
    return isinstance(error, OSError | HostError) and error.errno in {ENOENT, ECONNREFUSED}


# Writes the files of tunables in the form that each takes, and reads them back.

PART: Final = 64
"""Writes after which the event loop gets a turn."""

_QUEUES: Final = frozenset({TunableKind.RPS, TunableKind.XPS})
_MASKS: Final = frozenset(kind for kind, file in TUNABLE_FILES.items() if file.value == CPU_MASK)
_LISTS: Final = frozenset(kind for kind, file in TUNABLE_FILES.items() if file.value == CPU_LIST)


async def write_tunables(root: HostRoot, writes: Sequence[TunableRecord]) -> list[Written]:
    """Write files, and affinities of kernel threads; ENOENT for what is not there any more."""
    prefix = "" if root.live else root.path("").rstrip("/")
    done: list[Written] = []
    for at in range(0, len(writes), PART):
        part = [_request(one) for one in writes[at : at + PART]]
        try:
            answers = root.calls.write_tunables(part, prefix)
        except OSError as error:  # the broker started with a lower level of `quiet`
            answers = [TunableWritten(error.errno or EIO)] * len(part)
        for asked, answer in zip(part, answers, strict=True):
            gone = ENOENT if answer.errno == ESRCH else answer.errno
            done.append(Written(gone, _value(asked.kind, answer.value)))
        await asyncio.sleep(0)
    return done


def _request(one: TunableRecord) -> TunableWrite:
    value = one.written
    if one.key.kind in _MASKS:
        value = (CpuSet() if value == NO_CPU else CpuSet.parse(value)).hex_mask()
    return TunableWrite(one.key.kind.value, one.key.name, value)


def _value(kind: str, text: str) -> str | None:
    """Return what a file has, as it is observed; None for what makes no sense."""
    with contextlib.suppress(ParseError):
        if kind not in _MASKS | _LISTS:
            return text
        cpus = parse_mask(text.encode(), kind) if kind in _MASKS else CpuSet.parse(text)
        return str(cpus) or (NO_CPU if kind in _QUEUES else "")
    return None


WORK_KINDS: Final = frozenset(TUNABLE_FILES) - OF_INTERRUPTS


class KernelWork:
    """The tunables of `quiet: full`: where the kernel does its own work, idle states, governors."""

    def __init__(self, root: HostRoot, live: LiveConfig) -> None:
        self._root = root
        self._live = live
        self._policies: dict[str, FrequencyPolicy] = {}
        self._devices: Sequence[str] = ()
        self._seen: Sequence[Observed] = ()

    def _power(self) -> Iterator[Observed]:
        for cpu in online(self._root):
            latency = read_idle_limit(self._root, cpu)
            if not isinstance(latency, Unknown):
                key = TunableKey(TunableKind.IDLE_LIMIT, str(cpu))
                yield Observed(key, "", latency, f"idle limit of pCPU {cpu}")
        self._policies = {one.name: one for one in read_policies(self._root)}
        for policy in self._policies.values():
            key = TunableKey(TunableKind.GOVERNOR, policy.name)
            label = f"governor of pCPUs {policy.cpus}"
            yield Observed(key, str(policy.cpus), policy.governor, label)

    async def observe(self, *, fresh: bool) -> Sequence[Observed]:
        """Return what there is now; what cannot be read is left out. Raises HostError.

        Unless it must be `fresh`, and while there are the same network devices, it is what was
        there at the last look: on a large node that takes thousands of reads.
        """
        root = self._root
        devices = device_names(root)
        if not fresh and devices == self._devices:
            return self._seen
        self._devices = devices
        found: list[Observed] = []
        slices = Slices()
        for part in (self._node(), self._queues(), self._threads(), self._power()):
            for one in part:
                found.append(one)
                await slices.breathe()
        self._seen = found
        return found

    def goals(
        self,
        topology: HostTopology,
        state: QuietState,
        claims: Sequence[QuietClaim],
        seen: Sequence[Observed],
    ) -> Mapping[TunableKey, Goal]:
        """Return how they must be; those without a goal are given back."""
        goals = full_goals(topology, state, seen)
        goals.update(power_goals(seen, self._wanted(state, claims), self._policies))
        return goals

    def problems(
        self, state: QuietState, claims: Iterable[QuietClaim], seen: Sequence[Observed]
    ) -> Iterator[tuple[str, str]]:
        """Yield by sandbox why its pCPUs do not have the idle states and frequency they should."""
        claims = tuple(claims)
        wanted, limits = self._wanted(state, claims), idle_limits(seen)
        for claim in claims:
            for why in power_problems(claim, limits, wanted, self._policies):
                yield claim.sandbox, why

    def _wanted(self, state: QuietState, claims: Iterable[QuietClaim]) -> PowerGoals:
        now = self._live.now
        return wanted_power(state, claims, idle_value(now.quiet_idle_us), now.quiet_governor)

    def _node(self) -> Iterator[Observed]:
        work = mask(self._root.sys("devices/virtual/workqueue/cpumask"))
        if not isinstance(work, Unknown):
            key = TunableKey(TunableKind.WORKQUEUES)
            yield Observed(key, "", str(work), "mask of unbound workqueues")
        watched = cpu_list(self._root.proc("sys/kernel/watchdog_cpumask"))
        if not isinstance(watched, Unknown):
            key = TunableKey(TunableKind.WATCHDOG)
            yield Observed(key, "", str(watched), "mask of the lockup detectors")

    def _queues(self) -> Iterator[Observed]:
        queues = read_queues(self._root)
        for one in () if isinstance(queues, Unknown) else queues:
            key = TunableKey(TunableKind(one.kind), f"{one.device}/{one.name}")
            label = f"{one.kind}_cpus of {one.device} {one.name}"
            yield Observed(key, "", str(one.cpus) or NO_CPU, label)

    def _threads(self) -> Iterator[Observed]:
        threads = kernel_threads(self._root)
        for one in () if isinstance(threads, Unknown) else threads:
            key = TunableKey(TunableKind.KERNEL_THREAD, f"{one.tid}:{one.starttime}")
            label = f"affinity of {one.comm} (tid {one.tid})"
            yield Observed(key, "", str(one.affinity), label)
