"""Protobuf messages: our own minimal .proto files, and what scripts/proto makes of them.

Each module holds its file's descriptor, from which runtime.py makes the classes; the stubs are for
type checkers.

Only fields that kata-pin reads or writes are there; protobuf skips the others. Field numbers and
types are those of github.com/containerd/ttrpc/proto, github.com/containerd/nri/pkg/api and
github.com/kata-containers/kata-containers/src/libs/protocols/protos.
"""
