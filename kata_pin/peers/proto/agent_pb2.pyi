from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinuxCPU(_message.Message):
    __slots__ = ("shares", "quota", "period", "cpus", "mems")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMS_FIELD_NUMBER: _ClassVar[int]
    shares: int
    quota: int
    period: int
    cpus: str
    mems: str
    def __init__(self, shares: _Optional[int] = ..., quota: _Optional[int] = ..., period: _Optional[int] = ..., cpus: _Optional[str] = ..., mems: _Optional[str] = ...) -> None: ...

class LinuxResources(_message.Message):
    __slots__ = ("cpu",)
    CPU_FIELD_NUMBER: _ClassVar[int]
    cpu: LinuxCPU
    def __init__(self, cpu: _Optional[_Union[LinuxCPU, _Mapping]] = ...) -> None: ...

class UpdateContainerRequest(_message.Message):
    __slots__ = ("container_id", "resources")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    resources: LinuxResources
    def __init__(self, container_id: _Optional[str] = ..., resources: _Optional[_Union[LinuxResources, _Mapping]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: str
    def __init__(self, metrics: _Optional[str] = ...) -> None: ...

class StatsContainerRequest(_message.Message):
    __slots__ = ("container_id",)
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    def __init__(self, container_id: _Optional[str] = ...) -> None: ...

class StatsContainerResponse(_message.Message):
    __slots__ = ("cgroup_stats",)
    CGROUP_STATS_FIELD_NUMBER: _ClassVar[int]
    cgroup_stats: CgroupStats
    def __init__(self, cgroup_stats: _Optional[_Union[CgroupStats, _Mapping]] = ...) -> None: ...

class CgroupStats(_message.Message):
    __slots__ = ("cpu_stats",)
    CPU_STATS_FIELD_NUMBER: _ClassVar[int]
    cpu_stats: CpuStats
    def __init__(self, cpu_stats: _Optional[_Union[CpuStats, _Mapping]] = ...) -> None: ...

class CpuStats(_message.Message):
    __slots__ = ("cpu_usage",)
    CPU_USAGE_FIELD_NUMBER: _ClassVar[int]
    cpu_usage: CpuUsage
    def __init__(self, cpu_usage: _Optional[_Union[CpuUsage, _Mapping]] = ...) -> None: ...

class CpuUsage(_message.Message):
    __slots__ = ("total_usage", "percpu_usage")
    TOTAL_USAGE_FIELD_NUMBER: _ClassVar[int]
    PERCPU_USAGE_FIELD_NUMBER: _ClassVar[int]
    total_usage: int
    percpu_usage: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, total_usage: _Optional[int] = ..., percpu_usage: _Optional[_Iterable[int]] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("uid", "gid")
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    uid: int
    gid: int
    def __init__(self, uid: _Optional[int] = ..., gid: _Optional[int] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("user", "args", "env", "cwd", "no_new_privileges")
    USER_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    NO_NEW_PRIVILEGES_FIELD_NUMBER: _ClassVar[int]
    user: User
    args: _containers.RepeatedScalarFieldContainer[str]
    env: _containers.RepeatedScalarFieldContainer[str]
    cwd: str
    no_new_privileges: bool
    def __init__(self, user: _Optional[_Union[User, _Mapping]] = ..., args: _Optional[_Iterable[str]] = ..., env: _Optional[_Iterable[str]] = ..., cwd: _Optional[str] = ..., no_new_privileges: _Optional[bool] = ...) -> None: ...

class ExecProcessRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "process")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    process: Process
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., process: _Optional[_Union[Process, _Mapping]] = ...) -> None: ...

class ReadStreamRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "len")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    len: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., len: _Optional[int] = ...) -> None: ...

class ReadStreamResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class WaitProcessRequest(_message.Message):
    __slots__ = ("container_id", "exec_id")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ...) -> None: ...

class WaitProcessResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: int
    def __init__(self, status: _Optional[int] = ...) -> None: ...

class SignalProcessRequest(_message.Message):
    __slots__ = ("container_id", "exec_id", "signal")
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EXEC_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    container_id: str
    exec_id: str
    signal: int
    def __init__(self, container_id: _Optional[str] = ..., exec_id: _Optional[str] = ..., signal: _Optional[int] = ...) -> None: ...
