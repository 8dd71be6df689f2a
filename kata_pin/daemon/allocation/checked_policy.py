"""The policy that the configuration names, of whichever package, with every decision checked.

Where the policy behind it fails, a new container gets the shared pool, a running one keeps its
CPUs, and an ended one releases them. The failure is a note of the decision. Lifetime: the policy's.
Out of scope: the invariants (policy/alloc/invariants.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kata_pin.config.alloc import Alloc
from kata_pin.errors import ConfigError, KataPinError, reason_of
from kata_pin.model.alloc import AllocState, ContainerRequest, Decision, Refusal, Running
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.settings import AllocSettings
from kata_pin.model.topology import HostTopology
from kata_pin.policy.alloc.classes import kept_creation
from kata_pin.policy.alloc.invariants import Expected, Invariants, ended, in_pool, over
from kata_pin.policy.alloc.policies import BUILTIN, create
from kata_pin.policy.alloc.policy import GROUP, Factory, Policy

log = logging.getLogger(__name__)

MAX_SHOWN: Final = 200
"""Longest part of another package's error that is shown."""


class CheckedPolicy:
    """Asks a policy; the methods are those of Policy that decide."""

    def __init__(
        self, name: str, policy: Policy, topology: HostTopology, settings: AllocSettings
    ) -> None:
        self._name = name
        self._policy = policy
        self._invariants = Invariants(topology, settings)

    def allocate(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a new container its CPUs."""
        return self._asked(
            lambda: self._policy.allocate(state, request),
            Expected(state, (request,), _replaced(state, request), refusable=True),
            admitted=request,
            new=request.container_id,
        )

    def change(self, state: AllocState, request: ContainerRequest) -> Decision:
        """Give a running container what it requests now."""
        return self._asked(
            lambda: self._policy.change(state, request),
            Expected(state, (request,), _replaced(state, request)),
            admitted=request,
        )

    def release(self, state: AllocState, container_id: str) -> Decision:
        """Release a container's CPUs."""
        expected = Expected(state, gone=over(state, container_id))
        return self._asked(lambda: self._policy.release(state, container_id), expected)

    def reconcile(self, state: AllocState, running: Sequence[Running]) -> Decision:
        """Bring a state in line with what runs."""
        requests = [one.request for one in running]
        expected = Expected(state, requests, gone=ended(state, requests))
        return self._asked(lambda: self._policy.reconcile(state, running), expected)

    def decline(self, state: AllocState, request: ContainerRequest, refusal: Refusal) -> Decision:
        """Answer while the kubelet or another plugin decides."""
        expected = Expected(state, refusable=True)
        return self._asked(lambda: self._policy.decline(state, request, refusal), expected)

    def _asked(
        self,
        ask: Callable[[], Decision],
        expected: Expected,
        admitted: ContainerRequest | None = None,
        new: str = "",
    ) -> Decision:
        """Return the policy's decision; if it fails `admitted` gets the shared pool.

        Only the container `new` is being created.
        """
        try:
            decision = ask()
            why = self._invariants.violation(decision, expected)
        except BaseException as error:
            log.debug("allocator: policy %s", self._name, exc_info=True)
            why = f"{type(error).__name__}: {reason_of(error)}"
        else:
            if not why:
                return kept_creation(expected.before, decision, new)
        text = f"policy {self._name!r} fails: {why}"[:MAX_SHOWN]
        note = Note("alloc-policy", text, NoteLevel.WARNING)
        state = expected.before.without(*expected.gone)
        fallback = Decision(state)
        if admitted is not None:
            fallback = in_pool(state, admitted, self._name, text)
        return replace(fallback, notes=(note,))


def _replaced(state: AllocState, request: ContainerRequest) -> list[str]:
    """Return the init containers that a new one of their pod replaces."""
    return [one.container_id for one in state.of_pod(request.pod.pod_uid) if one.request.init]


def make_policy(settings: Alloc, topology: HostTopology) -> Policy:
    """Return the policy for a host; raises ConfigError that names what is wrong.

    Other packages provide policies by entry points; only the named one is loaded. Its errors count
    as a wrong setting and never end the daemon.
    """
    name = settings.policy
    third = {} if name in BUILTIN else _third(name)
    try:
        return create(name, topology, settings.settings, third)
    except KataPinError:
        raise
    except Exception as error:
        if name in BUILTIN:
            raise
        raise ConfigError(
            f"policy {name!r} cannot be made: {reason_of(error)}", key="alloc.policy"
        ) from error


def _third(name: str) -> dict[str, Factory]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - costs time that few need

    found = entry_points(group=GROUP, name=name)
    try:
        return {entry.name: entry.load() for entry in found}
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} cannot be loaded: {reason_of(error)}", key="alloc.policy"
        ) from error
