"""One sandbox's guest: keeps each container's cpuset in it as decided, in a task of its own.

A pass hands over its plan (`update`), which asks nothing; the task then talks to the guest, one
session at a time, each wait with a deadline, and rests longer after each failure. Host pins never
wait for it, except for `widen`: if a pass is about to move pairs between containers, they are
allowed on both their old and their new guest CPUs first. That takes at most WIDEN_S, and nothing if
the guest was not prompt last time, is not confined, or is being asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from kata_pin.base.config.tree import Guest, LiveConfig
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import (
    AgentDenied,
    AgentFailed,
    AgentUnavailable,
    AgentUnknown,
    AgentUnsupported,
    GuestError,
    HostError,
    ParseError,
    reason_of,
)
from kata_pin.base.sandbox import GuestFacts, Vmm
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import GuestState, Proof
from kata_pin.engine.sandboxes import Wakeup
from kata_pin.guest.cpus import GuestGoal, GuestPlan, GuestSteps, GuestView, Sent, guest_steps
from kata_pin.guest.probe import GuestProbe
from kata_pin.linux.files import HostRoot
from kata_pin.peers.agent.client import AgentAddress, AgentClient, VsockAddress, parse_address
from kata_pin.records.pins import GuestCpusets
from kata_pin.vmm.state_files import KataPaths, read_state

log = logging.getLogger(__name__)

AT_ONCE: Final = 8
"""Guests that are asked at the same time."""

SESSION_S: Final = 30.0
"""Longest that one session holds its turn; what is left waits for the next."""

WIDEN_S: Final = 0.05
"""Most that a pass waits for a guest whose pairs are about to move."""

PROMPT_S: Final = WIDEN_S / 2
"""A guest that was never faster than this is not asked before a pass."""

RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
"""Rests after the first, second, ... failure in a row."""

AGAIN_S: Final = 0.2
"""Least rest before a session that follows from the last one: a guest that answers something else
each time must not keep the daemon busy."""

MISSES: Final = 3
"""Failures to answer, in a row, after which a guest is called unreachable."""

MAX_PATIENCE: Final = 8
"""Most that the deadlines of the settings are multiplied by: each miss doubles them, because a busy
host can slow any guest down."""

DENIED_S: Final = 300.0
"""Rest after a denial: a policy is set once, as a rule before the first container."""

BAD: Final = frozenset({Proof.BROKEN, Proof.REFUSED})
"""What shows that a cpuset that was sent is not in force."""


class Agents(Struct, frozen=True):
    """The kata-agents of this host: where they are found, and how they are talked to.

    `turns` bounds how many guests are talked to at once.
    """

    root: HostRoot
    kata: KataPaths
    live: LiveConfig
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def settings(self) -> Guest:
        """Return the settings of guest pinning as they are now."""
        return self.live.now.guest

    def client(self, sandbox_id: str, vmm: Vmm, patience: int) -> AgentClient:
        """Return a client, not connected yet; its deadlines are `patience` times the settings'.

        Raises AgentUnknown and AgentUnavailable, as `address` does.
        """
        now = self.settings()
        return AgentClient(
            self.address(sandbox_id, vmm),
            connect_s=now.connect_ms / 1000 * patience,
            call_s=now.call_ms / 1000 * patience,
            calls=self.root.calls,
        )

    def address(self, sandbox_id: str, vmm: Vmm) -> AgentAddress:
        """Return where a sandbox's agent listens: QEMU's cid, else from Kata's state.

        A QEMU that names another guest's cid only has that guest asked about containers that it
        does not know: what changes something names a container of this sandbox. Raises
        AgentUnknown when neither has it, AgentUnavailable when it makes no sense.
        """
        try:
            if vmm.guest_cid:
                return VsockAddress(vmm.guest_cid)
            persisted = read_state(self.root, self.kata, sandbox_id)
            if persisted is not None and persisted.agent_url:
                return parse_address(persisted.agent_url)
        except (HostError, ParseError, ValueError) as error:
            raise AgentUnavailable(f"kata-agent address not usable: {error}") from error
        raise AgentUnknown(
            "kata-agent address unknown (neither in the VMM's arguments nor in Kata's state)"
        )


Decide = Callable[[GuestFacts], GuestPlan | None]
"""Returns what the last pass means for the guest, given what is known of the guest."""


class Keeper:
    """Keeps the containers' cpusets of one guest.

    `run` is the task's side, everything else the caller's.
    """

    def __init__(self, sandbox_id: str, agents: Agents, book: GuestCpusets) -> None:
        """Raises StateError when what was sent before cannot be read."""
        self._id = sandbox_id
        self._agents = agents
        self._book = book
        self._probe = GuestProbe(agents.root, agents.settings)
        self._sent = {name: Sent(cpus) for name, cpus in book.sent(sandbox_id).items()}
        self._vmm: Vmm | None = None
        self._decide: Decide = lambda _facts: None
        self._plan: GuestPlan | None = None
        self._goal = GuestGoal.LEAVE
        self._vcpus: frozenset[ThreadKey] = frozenset()
        self._again: frozenset[str] = frozenset()
        self._check = False
        self._moving = False
        self._talking = False
        self._over = False
        self._wake = Wakeup()
        self._settled = Wakeup()
        self._prompt = False
        self._trouble: tuple[GuestState, str] | None = None
        self._failures = 0
        self._patience = 1
        self._rest_until = 0.0
        self._nowhere = False
        self._asked_at: float | None = None

    # ---- what passes and audits ask for ---------------------------------------------------

    def update(
        self,
        vmm: Vmm,
        decide: Decide,
        goal: GuestGoal,
        *,
        again: bool = False,
        insist: bool = False,
    ) -> None:
        """Adopt what a pass found.

        `again`: Kata may have touched the cpusets, so repeat them. `insist`: without waiting for
        the end of a rest. Raises StateError when containers that are gone cannot be forgotten.
        """
        first = self._plan is None
        self._vmm, self._decide, self._moving = vmm, decide, False
        if goal is not GuestGoal.LEAVE or self._goal is not GuestGoal.GIVE_BACK:
            self._goal = goal
        self._probe.set_vmm(vmm)
        self._decided()
        vcpus = frozenset(one.key for one in self._plan.map.links) if self._plan else frozenset()
        changed = bool(self._vcpus) and vcpus != self._vcpus  # Kata onlines and resets after it
        self._vcpus = vcpus
        if first or again or insist or changed:
            self._again = frozenset(self._sent)
            failed = self._trouble is not None and self._trouble[0] is GuestState.FAILED
            if insist or (again and (failed or self._nowhere)):  # it may be there now
                self._rest_until = 0.0
        self._nudge()

    def audit(self) -> None:
        """Send everything again, and check whether it holds."""
        self._again = frozenset(self._sent)
        self._check = True
        self._nudge()

    def stop(self) -> None:
        """End the task when it wakes next: the sandbox has ended."""
        self._over = True
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until nothing is to be sent, or the last attempt failed; the caller's deadline."""
        await self._settled.wait()

    def _decided(self) -> None:
        """Decide again, with what is known by now."""
        last, self._plan = self._plan, self._decide(self._probe.facts)
        if self._plan is None or self._plan is last:
            return
        there = {one.container_id for one in self._plan.cpusets}
        gone = self._sent.keys() - there
        if gone:
            self._book.forget(self._id, gone)
            self._sent = {name: sent for name, sent in self._sent.items() if name in there}
        self._probe.keep_only((one.key for one in self._plan.map.links), there)

    def _nudge(self) -> None:
        if self._has_work:
            self._settled.clear()
            self._wake.set()
        elif not self._talking:
            self._settled.set()

    # ---- what is to be sent --------------------------------------------------------------

    def _steps(self, plan: GuestPlan) -> GuestSteps:
        standing = {name: sent.cpus for name, sent in self._sent.items()}
        wanted = plan.cpusets
        if self._goal is GuestGoal.GIVE_BACK:
            wanted = tuple(replace(one, cpus=None) for one in wanted)
        return guest_steps(standing, wanted, plan.map.every or plan.possible)

    @property
    def _targets(self) -> dict[str, CpuSet]:
        """What each container is to have; nothing while it is not to be talked to."""
        if self._plan is None or self._goal is GuestGoal.LEAVE:
            return {}
        return dict(self._steps(self._plan).narrow)

    @property
    def _due(self) -> dict[str, CpuSet]:
        """What has not been sent, or is to be sent again; nothing while vCPUs are being moved."""
        if self._moving:
            return {}
        return {
            name: cpus
            for name, cpus in self._targets.items()
            if name in self._again or self._is_new(self._sent.get(name), cpus)
        }

    @staticmethod
    def _is_new(sent: Sent | None, cpus: CpuSet) -> bool:
        return sent is None or sent.cpus != cpus or sent.proof in BAD

    @property
    def _has_work(self) -> bool:
        if self._due or not self._probe.kernel_known:
            return True
        if self._goal is GuestGoal.LEAVE:
            return False
        if self._check and self._sent:
            return True
        untried = self._asked_at is None and self._trouble is None
        plan = self._plan if self._check or untried else None
        return plan is not None and self._probe.wanted(plan)

    # ---- the task ------------------------------------------------------------------------

    async def run(self) -> None:
        """Talk to the guest whenever there is something to send, until stopped."""
        while not self._over:
            await self._wake.wait()
            self._wake.clear()
            await self._rest()
            await asyncio.sleep(0)  # hooks that waited for the same pass are answered first
            if not self._over:
                await self.attempt()

    async def _rest(self) -> None:
        """Wait for the end of the rest after a failure; `stop` and `update` can end it."""
        while not self._over and (left := self._rest_until - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            self._wake.clear()

    async def attempt(self) -> None:
        """Do what is to be done, once; never raises for what a guest did."""
        try:
            await self._probe.read_kernel()
            self._decided()
            if self._has_work and self._vmm is not None:
                await self._in_turn(self._vmm)
        except AgentDenied as error:
            self._failed(GuestState.DENIED, str(error), DENIED_S)
        except AgentUnknown as error:
            self._failed(GuestState.UNREACHABLE, str(error), RETRY_S[-1])
            self._nowhere = True
        except AgentUnsupported as error:
            self._failed(GuestState.FAILED, str(error), DENIED_S)
        except GuestError as error:
            self._missed(str(error))
        except TimeoutError:
            self._missed(f"not done within {SESSION_S:g} s")
        except Exception as error:  # the fault barrier of one guest
            log.error("sandbox %s: guest: %s", self._id, reason_of(error))
            log.debug("sandbox %s: guest", self._id, exc_info=True)
            self._failed(GuestState.FAILED, reason_of(error))
        if self._has_work:
            self._rest_until = max(self._rest_until, time.monotonic() + AGAIN_S)
            self._wake.set()
        if not self._has_work or self._trouble is not None:
            self._settled.set()

    async def _in_turn(self, vmm: Vmm) -> None:
        async with self._agents.turns:
            self._talking = True
            try:
                async with asyncio.timeout(SESSION_S):
                    await self._session(vmm)
            finally:
                self._talking = False
        bad = sum(sent.proof in BAD for sent in self._sent.values())
        if bad:
            text = f"{bad} of {len(self._sent)} containers are not on their assigned guest CPUs"
            self._failed(GuestState.FAILED, text)
        else:
            self._trouble, self._failures, self._rest_until = None, 0, 0.0

    async def _session(self, vmm: Vmm) -> None:
        started = time.monotonic()
        async with self._agents.client(self._id, vmm, self._patience) as agent:
            connected = time.monotonic()
            for name in tuple(self._due):
                if (cpus := self._due.get(name)) is None:  # its container ended meanwhile
                    continue
                asked = time.monotonic()
                await self._tell(agent, name, cpus)
                took_s = time.monotonic() - asked + connected - started
                self._prompt = self._prompt or took_s < PROMPT_S
            self._asked_at = time.monotonic()
            self._check = False
            await self._measure(agent)
            await self._verify(agent)
        if agent.slowest_s * self._patience < agent.call_s:  # the settings' own deadline would do
            self._patience = max(1, self._patience // 2)

    async def _measure(self, agent: AgentClient) -> None:
        plan = self._plan
        if plan is not None and self._probe.wanted(plan):
            container = next((one.container_id for one in plan.cpusets), "")
            await self._probe.measure(agent, plan, container)
            self._decided()

    async def _tell(self, agent: AgentClient, name: str, cpus: CpuSet) -> None:
        """Have one container's cpuset set; the book knows of it before the guest does."""
        self._book.send(self._id, name, cpus)
        before = self._sent.get(name)
        self._sent[name] = Sent(cpus, Proof.REFUSED, "the agent has not answered")
        try:
            await agent.set_cpus(name, cpus)
        except GuestError as error:
            if name in self._sent:
                self._sent[name] = Sent(cpus, Proof.REFUSED, str(error))
            if isinstance(error, AgentFailed):  # only this container: go on with the others
                return
            raise
        if name not in self._sent:  # the container ended meanwhile, and is forgotten
            return
        self._again -= {name}
        if before is not None and not self._is_new(before, cpus):
            self._sent[name] = before
        else:
            self._sent[name] = Sent(cpus)
            log.info("sandbox %s: guest: container %s on guest CPUs %s", self._id, name, cpus)

    async def _verify(self, agent: AgentClient) -> None:
        """Check whether what was sent holds."""
        for name, sent in list(self._sent.items()):
            if self._plan is None or sent.proof is Proof.REFUSED:
                continue
            found = await self._probe.proof(agent, name, sent.cpus, self._plan)
            if found is not None and self._sent.get(name) is sent:
                self._sent[name] = replace(sent, proof=found[0], detail=found[1])

    def _missed(self, text: str) -> None:
        """Give the guest more time; it is unreachable once it missed several times."""
        self._patience = min(MAX_PATIENCE, self._patience * 2)
        if self._failures + 1 < MISSES:
            self._failed(GuestState.PENDING, f"trying again: {text}")
        else:
            self._failed(GuestState.UNREACHABLE, text)

    def _failed(self, state: GuestState, text: str, rest_s: float | None = None) -> None:
        """Rest for so long, by default longer after each failure in a row."""
        if rest_s is None:
            rest_s = RETRY_S[min(self._failures, len(RETRY_S) - 1)]
        if self._trouble is None or self._trouble[0] is not state:
            level = logging.INFO if state is GuestState.PENDING else logging.WARNING
            log.log(level, "sandbox %s: guest %s: %s", self._id, state.value, text)
        self._trouble = (state, text)
        self._prompt = self._nowhere = False
        self._failures += 1
        self._rest_until = time.monotonic() + rest_s

    @property
    def may_widen(self) -> bool:
        """Whether the guest may be asked before a pass: it was prompt, and is not being asked."""
        idle = not self._talking and self._trouble is None
        return idle and self._prompt and bool(self._sent) and self._goal is GuestGoal.KEEP

    async def widen(self, decide: Decide) -> None:
        """Let containers run on their old and new guest CPUs before a pass moves vCPUs."""
        plan = decide(self._probe.facts)
        if plan is None or self._vmm is None or not self.may_widen:
            return
        wider = self._steps(plan).widen
        if not wider:
            return
        self._moving = self._talking = True
        try:
            connecting = self._agents.client(self._id, self._vmm, 1)
            async with asyncio.timeout(WIDEN_S), connecting as agent:
                for name, cpus in wider.items():
                    await self._tell(agent, name, cpus)
        except (GuestError, TimeoutError) as error:
            self._prompt = False
            log.info("sandbox %s: guest cpusets not widened: %s", self._id, reason_of(error))
        finally:
            self._talking = False

    @property
    def facts(self) -> GuestFacts:
        """What is known of the guest."""
        return self._probe.facts

    def view(self, plan: GuestPlan) -> GuestView:
        """Return the state of guest pinning, for a plan that was made with `facts`."""
        state, detail = self._state()
        asked_s = None if self._asked_at is None else time.monotonic() - self._asked_at
        return GuestView(plan, state, detail, asked_s, dict(self._sent))

    def _state(self) -> tuple[GuestState, str]:
        if self._goal is GuestGoal.LEAVE:
            return GuestState.OFF, ""
        targets = self._targets
        if targets and self._trouble is not None:
            return self._trouble
        if self._due:
            return GuestState.PENDING, ""
        if not self._agents.settings().enabled:
            return GuestState.OFF, ""
        return (GuestState.APPLIED if targets else GuestState.IDLE), ""
