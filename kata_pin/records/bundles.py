"""From a hook's message and its OCI bundle to a container's record (D3, D4).

No path of a bundle is trusted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from kata_pin.base.errors import HostError, KataPinError, ParseError, is_transient
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerState
from kata_pin.linux.owned_files import FileRefused, read_below
from kata_pin.peers.oci import OciConfig, OciState, Phase, parse_config, parse_state, record
from kata_pin.records.containers import RESOURCES, Registry
from kata_pin.records.hooks import HookMessage
from kata_pin.rights.broker.rows import is_bundle
from kata_pin.rights.calls import DIRECT, Calls

# Reading a container's config.json from its OCI bundle, without trusting the path.
#
# The path comes from a hook's stdin or from an annotation, so a pod's author may have chosen it. It
# must lie below a root that the administrator allows (D4), no symlink is followed on the way, and
# the file must be a regular one owned by root (or us), of bounded size. The roots are resolved
# once.

DEFAULT_ROOTS = (
    "/run/containerd",
    "/run/k3s/containerd",
    "/run/docker/containerd",
    "/run/containers/storage",
)
CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
LAYOUTS = ("io.containerd.runtime.v2.task/k8s.io/{}", "overlay-containers/{}/userdata")
"""Where containerd's CRI plugin and CRI-O keep a container's bundle, below a root."""

MAX_PATH_BYTES = 4096  # PATH_MAX of linux/limits.h


class BundleGone(KataPinError):  # noqa: N818 - a state of the world, not a fault
    """The bundle, or its config.json, is no longer there: the container was deleted."""


class BundleRefused(KataPinError):  # noqa: N818 - refused by a rule, not failed
    """The bundle may not be read; the message ends with the rule it breaks."""

    def __init__(self, bundle: str, rule: str, *, hint: str = "") -> None:
        super().__init__(f"cannot read bundle {bundle[:256]!r}: {rule}", hint=hint)


class BundleReader:
    """Reads config.json below a fixed set of roots.

    `roots` are absolute folders; they need not exist yet. A bundle's path may spell its root as
    configured or as resolved, and /run also as /var/run where that is a link to it.
    """

    def __init__(self, roots: Iterable[str] = DEFAULT_ROOTS, calls: Calls = DIRECT) -> None:
        self._calls = calls
        self._roots: dict[str, str] = {}
        for root in roots:
            resolved = os.path.realpath(root)
            for spelling in _spellings(os.path.normpath(root), resolved):
                self._roots[spelling] = resolved

    def read_config(self, bundle: str) -> bytes:
        """Return `bundle`/config.json, at most MAX_CONFIG_BYTES.

        Raises BundleGone when it does not exist, BundleRefused when it may not be read, HostError
        when it cannot be read for a passing reason, such as too many open files.
        """
        parts = (*self._locate(bundle), CONFIG_NAME)
        try:
            return read_below("/", *parts, limit=MAX_CONFIG_BYTES, calls=self._calls)
        except FileRefused as error:
            raise BundleRefused(bundle, str(error)) from error
        except OSError as error:
            raise _meaning(bundle, error) from error

    def of_pod_container(self, container_id: str) -> tuple[str, bytes] | None:
        """Return the bundle of a container of CRI and its config.json; None if none is found."""
        for root in self._roots:
            for layout in LAYOUTS:
                bundle = f"{root}/{layout.format(container_id)}"
                with suppress(BundleGone, BundleRefused, HostError):
                    return bundle, self.read_config(bundle)
        return None

    def _locate(self, bundle: str) -> tuple[str, ...]:
        """Return the path components of `bundle` from /, its root resolved."""
        if not bundle.startswith("/") or "\0" in bundle:
            raise BundleRefused(bundle, "not an absolute path")
        try:
            length = len(os.fsencode(bundle))
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON lets through
            raise BundleRefused(bundle, "not a valid path") from error
        if length > MAX_PATH_BYTES:
            raise BundleRefused(bundle, f"path longer than {MAX_PATH_BYTES} bytes")
        parts = tuple(part for part in bundle.split("/") if part not in {"", "."})
        if ".." in parts:
            raise BundleRefused(bundle, "path with '..'")
        for depth in range(len(parts) - 1, 0, -1):
            resolved = self._roots.get("/" + "/".join(parts[:depth]))
            if resolved is not None:
                if not is_bundle(parts[depth:]):
                    raise BundleRefused(bundle, "not where a runtime keeps bundles below its root")
                return (*(p for p in resolved.split("/") if p), *parts[depth:])
        raise BundleRefused(
            bundle, "outside all bundle roots", hint="see bundle_roots in the settings"
        )


def _spellings(configured: str, resolved: str) -> set[str]:
    """Return the ways in which runtimes may spell a root."""
    spellings = {configured, resolved}
    if resolved.startswith("/run/") and os.path.realpath("/var/run") == "/run":
        spellings.add("/var" + resolved)
    return spellings


def _meaning(bundle: str, error: OSError) -> KataPinError:
    """Translate an error of open(2) or read(2)."""
    if error.errno == errno.ENOENT:
        return BundleGone(f"bundle {bundle[:256]!r} no longer exists")
    if is_transient(error):
        return HostError("read config.json of", f"bundle {bundle[:256]!r}", error.errno or 0)
    # O_NOFOLLOW: ELOOP for a link, but ENOTDIR where O_DIRECTORY is asked too (open(2))
    if error.errno in {errno.ELOOP, errno.ENOTDIR}:
        return BundleRefused(bundle, "a symlink or a file in place of a folder")
    return BundleRefused(bundle, os.strerror(error.errno or 0).lower())


# A message counts once: an older one, or the same one again, changes nothing.


@dataclass
class Intake:
    """Turns messages into records; holds nothing but its two collaborators."""

    _registry: Registry
    _bundles: BundleReader

    def record(self, message: HookMessage, *, spooled: bool) -> Container | str:
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
    weighed against other sources' (containers.py).
    """
    resources = {name: getattr(known, name) for name in RESOURCES if name != "cpus"}
    if all(value in {None, ""} for value in resources.values()):
        return container
    return replace(container, **resources)
