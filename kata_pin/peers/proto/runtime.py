"""Message classes from descriptors, with whatever protobuf is installed.

protoc's own Python modules refuse every protobuf that is older than the protoc that wrote them, and
newer ones after two major versions. A serialized FileDescriptorProto has no version: it is
protobuf's own wire format.
"""

from __future__ import annotations

import sys

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def define(module: str, serialized: bytes) -> None:
    """Give a module the messages of a FileDescriptorProto, its enums and their values."""
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
