"""Protobuf messages: our own minimal .proto files, and what scripts/proto makes of them.

Each module holds its file's descriptor, from which `define` makes the classes with whatever
protobuf is installed; the stubs are for type checkers. protoc's own Python modules refuse every
protobuf that is older than the protoc that wrote them, and newer ones after two major versions. A
serialized FileDescriptorProto has no version: it is protobuf's own wire format.

Only fields that kata-pin reads or writes are there; protobuf skips the others. Field numbers and
types are those of github.com/containerd/ttrpc/proto, github.com/containerd/nri/pkg/api and
github.com/kata-containers/kata-containers/src/libs/protocols/protos.

A module is imported when it is first used, as `proto.nri_pb2`: protobuf takes 4 MiB, and a daemon
without NRI and without a guest to talk to has no use for it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kata_pin.peers.proto import agent_pb2, crirequest_pb2, kubelet_pb2, nri_pb2, ttrpc_pb2

__all__ = ["agent_pb2", "crirequest_pb2", "kubelet_pb2", "nri_pb2", "ttrpc_pb2"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")


def define(module: str, serialized: bytes) -> None:
    """Give a module the messages of a FileDescriptorProto, its enums and their values."""
    from google.protobuf import descriptor_pool, message_factory  # noqa: PLC0415 - see above
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper  # noqa: PLC0415

    pool = descriptor_pool.Default()
    file = pool.AddSerializedFile(serialized)
    if hasattr(message_factory, "GetMessageClass"):  # since 4.22
        class_of = message_factory.GetMessageClass
    else:
        class_of = message_factory.MessageFactory(pool).GetPrototype
    names = vars(sys.modules[module])
    names["DESCRIPTOR"] = file
    for name, message in file.message_types_by_name.items():
        names[name] = class_of(message)
    for name, enum in file.enum_types_by_name.items():
        names[name] = EnumTypeWrapper(enum)
        names.update((value.name, value.number) for value in enum.values)
