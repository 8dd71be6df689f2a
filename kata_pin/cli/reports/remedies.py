"""What helps against what `doctor` finds: on a node, and in a pod (remedy.py)."""

from __future__ import annotations

from typing import Final

from kata_pin.remedy import Remedy

_NEW_POD: Final = "delete this pod: its DaemonSet starts another"
_CONFIG: Final = "correct the chart's value config, then helm upgrade"

START: Final = Remedy("systemctl start kata-pin", "kubectl logs -c daemon of this pod says why")
RESTART: Final = Remedy("systemctl restart kata-pin", _NEW_POD)
OTHER_DAEMON: Final = Remedy(
    "stop all but one: systemctl status kata-pin",
    "stop all but one: on the node systemctl disable --now kata-pin",
)
RELOAD: Final = Remedy(
    "kata-pin config check; then systemctl reload kata-pin", _CONFIG, value="config"
)
NEW_CONFIG: Final = Remedy("kata-pin config check {file}", _CONFIG, value="config")
CAPABILITY: Final = Remedy("run as root", "give the container the capabilities that the chart has")
CGROUPS: Final = Remedy(
    "in a container: --pid host and --volume /sys/fs/cgroup:/sys/fs/cgroup:ro",
    "the pod needs hostPID, and the host's cgroups: see the chart's value paths.cgroup",
    value="paths.cgroup",
)
DEBUGFS: Final = Remedy(
    "mount -t debugfs none {mount}", "see the chart's value paths.debugfs", value="paths.debugfs"
)
ROLES: Final = Remedy(
    "mount debugfs, or grant CAP_SYS_PTRACE",
    "see the chart's value paths.debugfs; give the container the capabilities that the chart has",
    value="paths.debugfs",
)
EVENTS: Final = Remedy("{hint}", "{hint}: see the chart's value hostNetwork", value="hostNetwork")
VSOCK: Final = Remedy(
    "modprobe vhost_vsock",
    "modprobe vhost_vsock on the node; the chart's value seccompProfile must allow AF_VSOCK",
    value="seccompProfile",
)
RECORDS: Final = Remedy(
    "run as root, or with CAP_PERFMON and a seccomp filter that allows perf_event_open",
    "the chart's value seccompProfile must allow perf_event_open",
    value="seccompProfile",
)
_UNPRIVILEGED: Final = (
    "containers see /proc and /sys read-only unless they are privileged, which the chart's is not: "
    "set quiet: report in the chart's value config, or run kata-pin as a service of the node"
)
DROP_IN: Final = Remedy(
    "run kata-pin install again, which adds the drop-in {file}; then systemctl daemon-reload and "
    "systemctl restart kata-pin",
    _UNPRIVILEGED,
    value="config",
)
DROP_IN_UNUSED: Final = Remedy(
    "the drop-in {file} is installed and not in force: systemctl daemon-reload; systemctl restart "
    "kata-pin",
    _UNPRIVILEGED,
    value="config",
)
HOOKS: Final = Remedy(
    "kata-pin install --containerd, --crio or --podman",
    "not needed where NRI is connected: see the row NRI",
)
HOOKS_LEFT: Final = Remedy(
    "kata-pin install, or remove the hook from the runtimes that still name it",
    "on the node, remove the hook from the runtimes that still name it",
)
NRI: Final = Remedy(
    "enable NRI in containerd or CRI-O",
    "enable NRI in containerd or CRI-O; its socket's folder is the chart's value paths.nri",
    value="paths.nri",
)
KATA_CONFIGS: Final = Remedy(
    "name its folder in paths.kata_configs",
    "name its folder in paths.kata_configs of the chart's value config, and add it to the chart's "
    "value paths.kataConfigs",
    value="paths.kataConfigs",
)
PARANOID: Final = Remedy(
    "sysctl kernel.perf_event_paranoid=2 (in /etc/sysctl.d: for good)",
    "on the node: sysctl kernel.perf_event_paranoid=2 (in /etc/sysctl.d: for good)",
)
NOT_MOUNTED: Final = Remedy(
    "", "add its folder on the node to the chart's value paths.more", value="paths.more"
)
