"""Turns a hook's message, of the socket or the spool, into a record (D3, D4).

A message counts once: an older one, or the same one again, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kata_pin.daemon.store.container_rows import RESOURCES
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import ParseError
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.sources.bundles import BundleGone, BundleReader, BundleRefused
from kata_pin.wire.container_id import record
from kata_pin.wire.hook_message import HookMessage
from kata_pin.wire.oci import OciConfig, OciState, Phase, parse_config, parse_state


@dataclass
class Intake:
    """Turns messages into records; holds nothing but its two collaborators."""

    _registry: Registry
    _bundles: BundleReader

    def take(self, message: HookMessage, *, spooled: bool) -> Container | str:
        """Return a message's container as recorded and committed, or why nothing was recorded.

        ParseError when the message can never be taken: its JSON or its ids are beyond repair.
        StateError when the registry cannot be written, HostError when the bundle cannot be read
        for a passing reason: the hook must spool, and the message is read again.
        """
        state = parse_state(message.body)
        config, note, gone = self._config(state)
        source = f"{'spool' if spooled else 'hook'}:{message.phase.value}"
        container = record(
            message.phase, state, config, stamp_ns=message.stamp_ns, source=source, note=note
        )
        known = self._registry.container(container.id)
        if known is None and message.phase is Phase.POSTSTOP:
            return "the container is unknown and has ended"
        if known is None and gone and spooled:
            return "its bundle is gone"
        if config is None and known is not None:
            container = replace(container, sandbox_id=known.sandbox_id, kind=known.kind)
        after_create = container.state is not ContainerState.CREATED
        if config is not None and known is not None and known.state.counts and after_create:
            container = _with_resources_of(known, container)
        unread = config is None and (known is None or self._registry.is_unread(known.id))
        if not self._registry.record(
            container, stamp_ns=message.stamp_ns, pid=message.pid, unread=unread
        ):
            return "a newer message is recorded"
        return container

    def _config(self, state: OciState) -> tuple[OciConfig | None, str, bool]:
        """Return the bundle's config.json, or None, why it could not be had, and if it is gone."""
        try:
            return parse_config(self._bundles.read_config(state.bundle)), "", False
        except BundleGone as error:
            return None, str(error), True
        except (BundleRefused, ParseError) as error:
            return None, str(error), False


def _with_resources_of(known: Container, container: Container) -> Container:
    """Keep what is known of a living container's quota and shares.

    config.json has what it was created with, and an update may have changed that. Its cpuset is
    weighed against other sources' (observations.py).
    """
    resources = {name: getattr(known, name) for name in RESOURCES if name != "cpus"}
    if all(value in {None, ""} for value in resources.values()):
        return container
    return replace(container, **resources)
