"""Every error that kata-pin raises on purpose.

    KataPinError                   message, hint, exit_code
     +- ConfigError                file and key path
     +- ParseError                 what was parsed, where it went wrong
     +- RemoteProtocolError        a peer (QEMU, hook, control client, agent) broke its protocol
     +- HostError                  operation, subject, errno
     |   +- TaskGone               a thread or process ended: normal during a pass
     |   +- NotRead                what may take for ever to read was not read yet, or hung
     +- VmmError                   no VMM found, or not accepted as the sandbox's
     |   +- QmpUnavailable         QMP cannot be used now
     +- GuestError                 the kata-agent of a guest did not do what was requested
     |   +- AgentUnavailable       no connection, a lost one, or no answer in time
     |   |   +- AgentUnknown       no address of it is known
     |   +- AgentDenied            the guest's policy denies the request: an ordinary state
     |   +- AgentUnsupported       the agent does not know the request
     |   +- AgentFailed            any other refusal, or an invalid answer
     +- StateError                 the registry's file is damaged or of another version
     +- DaemonError                the daemon is not running or refused a request

A class exists only if some caller handles it differently. Messages are lower case, without a final
period; `hint` names a command or a file that helps. Expected conditions in a batch (a thread that
ended) are results, not exceptions.
"""

from __future__ import annotations

import errno
import os
from typing import Final

TRANSIENT: Final = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EIO, errno.EINTR),
        *(errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT),
    }
)
"""Errnos that say nothing about a file: the same call may succeed a moment later."""


class KataPinError(Exception):
    """Root of the tree; `exit_code` is the exit status of the command line.

    A message may quote what others wrote: what UTF-8 cannot hold (a lone surrogate of JSON, a byte
    of a file name) is shown as an escape.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(KataPinError):
    """A setting is wrong; `file` and `key` say which."""

    exit_code = 78  # EX_CONFIG of sysexits.h

    def __init__(self, message: str, *, file: str = "", key: str = "", hint: str = "") -> None:
        place = ": ".join(part for part in (file, key) if part)
        super().__init__(f"{place}: {message}" if place else message, hint=hint)
        self.file = file
        self.key = key


class ParseError(KataPinError):
    """Input is malformed; `source` names the input, `text` the offending part (clipped)."""

    def __init__(self, message: str, *, source: str = "", text: str = "", hint: str = "") -> None:
        clipped = text if len(text) <= 80 else text[:77] + "..."
        full = f"{source}: {message}" if source else message
        super().__init__(f"{full}: {clipped!r}" if text else full, hint=hint)
        self.source = source
        self.text = clipped


class RemoteProtocolError(KataPinError):
    """The peer sent something that its protocol does not allow."""


class HostError(KataPinError):
    """A system call failed; carries the operation, its subject and the errno (0 if none)."""

    def __init__(self, operation: str, subject: str, errno: int = 0, *, hint: str = "") -> None:
        reason = os.strerror(errno) if errno else "failed"
        super().__init__(f"{operation} {subject}: {reason}", hint=hint)
        self.operation = operation
        self.subject = subject
        self.errno = errno


def is_transient(error: OSError) -> bool:
    """Whether a system call failed for a passing reason, so that nothing may be concluded."""
    return error.errno in TRANSIENT


def reason_of(error: BaseException) -> str:
    """Return why something failed, in words; str() of a system call's error begins `[Errno N]`."""
    if isinstance(error, OSError) and error.strerror:
        place = (
            f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        )
        return f"{place}{error.strerror}"
    return str(error) or type(error).__name__


class TaskGone(HostError):  # noqa: N818 - a state of the world, not a fault
    """The thread or process ended; normal during a pass."""


class NotRead(HostError):  # noqa: N818 - an ordinary state
    """What can take for ever to read was not read yet, or did not answer in time (`hung`)."""

    def __init__(self, subject: str, *, hung: bool) -> None:
        super().__init__("read", subject)
        self.hung = hung
        self.message = (
            f"{subject} cannot be read: the process's memory is locked"
            if hung
            else f"{subject} was not read yet"
        )

    def __str__(self) -> str:
        return self.message


class VmmError(KataPinError):
    """The sandbox's VMM was not found, or a candidate was not accepted."""


class QmpUnavailable(VmmError):  # noqa: N818 - an ordinary state
    """QMP cannot be used now: held by another client, closed, or too slow."""


class GuestError(KataPinError):
    """The agent in a guest did not do what was requested; its text is bounded and printable."""


class AgentUnavailable(GuestError):  # noqa: N818 - an ordinary state
    """No connection to the agent, a lost one, or no answer in time."""


class AgentUnknown(AgentUnavailable):
    """Nothing says where the agent listens: asking again is useless until something does."""


class AgentDenied(GuestError):  # noqa: N818 - an ordinary state
    """The guest's policy denies the request (Kata's agent policy, confidential pods)."""


class AgentUnsupported(GuestError):  # noqa: N818 - an ordinary state
    """The agent's version or build does not know the request."""


class AgentFailed(GuestError):  # noqa: N818 - names what failed
    """The agent refused for another reason, or its answer was invalid."""


class StateError(KataPinError):
    """The registry's file cannot be used; the message names it."""


class DaemonError(KataPinError):
    """The daemon is not running, did not answer in time, or refused the request."""
