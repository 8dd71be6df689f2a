"""Protobuf messages: our own minimal .proto files, and what scripts/proto makes of them.

Each module holds its file's descriptor, from which runtime.py makes the classes; the stubs are for
type checkers.

Only fields that kata-pin reads or writes are there; protobuf skips the others. Field numbers and
types are those of github.com/containerd/ttrpc/proto, github.com/containerd/nri/pkg/api and
github.com/kata-containers/kata-containers/src/libs/protocols/protos.

A module is imported when it is first used, as `proto.nri_pb2`: protobuf takes 4 MiB, and a daemon
without NRI and without a guest to talk to has no use for it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kata_pin.peers.proto import agent_pb2, crirequest_pb2, kubelet_pb2, nri_pb2, ttrpc_pb2

__all__ = ["agent_pb2", "crirequest_pb2", "kubelet_pb2", "nri_pb2", "ttrpc_pb2"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
