"""Reading a container's config.json from its OCI bundle, without trusting the path.

The path comes from a hook's stdin or from an annotation, so a pod's author may have chosen it. It
must lie below a root that the administrator allows (D4), no symlink is followed on the way, and the
file must be a regular one owned by root (or us), of bounded size. The roots are resolved once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import HostError, KataPinError, is_transient
from kata_pin.owned_file import FileRefused, read_below

DEFAULT_ROOTS = (
    "/run/containerd",
    "/run/k3s/containerd",
    "/run/docker/containerd",
    "/run/containers/storage",
)
CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
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
