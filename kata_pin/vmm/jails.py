"""Firecracker in a jail of Kata's (D24).

Its jailer copies the program into a folder that is named after the sandbox, and makes that folder
the root of the process, in a mount namespace of its own: the executable reads as `/firecracker`,
which is no file of the host. What counts is that root and executable are the very folder and file
of the sandbox's jail, and that only root may write there.
"""

from __future__ import annotations

import os
from errno import EACCES, ESTALE
from typing import Final

from kata_pin.errors import reason_of
from kata_pin.vmm.allow_list import VmmAllowlist
from kata_pin.vmm.checks import Refused
from kata_pin.vmm.host_access import HostAccess
from kata_pin.vmm.state_files import KataPaths

_REASONS: Final = {
    EACCES: "others than root may write there",
    ESTALE: "its root is another folder, or it runs another file",
}


def jail_of(
    host: HostAccess, allowed: VmmAllowlist, paths: KataPaths, sandbox_id: str, pid: int
) -> str:
    """Return the sandbox's jail that a process runs in; raises Refused, and as `exe_file` does.

    In a captured tree only the folder's existence can be looked at.
    """
    exe, root = host.exe_file(pid), host.root
    name = os.path.basename(exe.path)
    jails = [os.path.join(base, *parts) for base, parts in paths.jails(name, sandbox_id)]
    if exe.deleted or not allowed.may_be_jailed(exe.path):
        raise Refused(f"its executable {exe.path} changed during the check, or was deleted")
    if root.live:
        allowed.check_owner(exe)
    doubts = []
    for jail in jails:
        try:
            if root.live:
                root.calls.verify_jail(pid, jail)
            else:
                root.calls.stat(root.path(jail))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            why = _REASONS.get(error.errno or 0) or reason_of(error)
            doubts.append(f"it is not in the sandbox's jail {jail}: {why}")
        else:
            return jail
    raise Refused("; ".join(doubts) or f"it runs {exe.path} in no jail of the sandbox's")
