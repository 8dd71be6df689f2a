"""The rights of kata-pin's container on a cluster, as options of podman.

The chart's DaemonSet has the same: hostPID, hostNetwork, a read-only root, no privilege escalation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

CAPABILITIES: Final = (
    "SYS_NICE",  # sched_setaffinity(2)
    "SYS_PTRACE",  # /proc/<pid>/exe and fd of a VMM
    "DAC_READ_SEARCH",  # Kata's state
    "DAC_OVERRIDE",  # connecting to root's sockets
    "PERFMON",  # recording who runs on exclusive pCPUs
    # a container starts as root, and the daemon becomes its own user
    "SETUID",
    "SETGID",
    "CHOWN",
)

OPTIONS: Final = (
    *("--pid", "host"),
    *("--network", "host"),  # process events
    *("--cgroupns", "private"),  # what a pod has, unless it is privileged
    *("--read-only", "--read-only-tmpfs=false"),
    *("--cap-drop", "all", "--cap-add", ",".join(CAPABILITIES)),
    *("--security-opt", "no-new-privileges"),
    *("--security-opt", "seccomp=unconfined"),  # RuntimeDefault refuses AF_VSOCK
    *("--security-opt", "apparmor=unconfined"),  # the default forbids /proc/<pid>/exe of others
    *("--ulimit", "nofile=1024:20000", "--ulimit", "nproc=1024:20000"),
)

CGROUPS: Final = Path("/sys/fs/cgroup")


def volumes(folders: Mapping[Path, str]) -> list[str]:
    """Return the options for the host's folders and files, each `ro` or `rw`, at the same path."""
    return [
        word
        for path, mode in folders.items()
        for word in ("--volume", f"{path}:{path}:{mode},rslave")
    ]
