"""Every error that kata-pin raises on purpose.

    KataPinError                   message, hint, exit_code
     +- ConfigError                file and key path
     +- ParseError                 what was parsed, where it went wrong
     +- RemoteProtocolError        a peer (QEMU, hook, control client, agent) broke its protocol
     +- HostError                  operation, subject, errno
     |   +- TaskGone               a thread or process ended: normal during a pass
     +- VmmError                   no VMM found, or not accepted as the sandbox's
     |   +- QmpUnavailable         QMP cannot be used now
     +- GuestError                 the kata-agent of a guest did not do what was requested
     |   +- AgentUnavailable       no connection, a lost one, or no answer in time
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

import os


class KataPinError(Exception):
    """Root of the tree; `exit_code` is the exit status of the command line."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
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


class TaskGone(HostError):  # noqa: N818 - a state of the world, not a fault
    """The thread or process ended; normal during a pass."""


class VmmError(KataPinError):
    """The sandbox's VMM was not found, or a candidate was not accepted."""


class QmpUnavailable(VmmError):  # noqa: N818 - an ordinary state
    """QMP cannot be used now: held by another client, closed, or too slow."""


class GuestError(KataPinError):
    """The agent in a guest did not do what was requested; its text is bounded and printable."""


class AgentUnavailable(GuestError):  # noqa: N818 - an ordinary state
    """No connection to the agent, a lost one, or no answer in time."""


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
