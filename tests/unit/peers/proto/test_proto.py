"""Message classes from descriptors: those of the .proto files, with the names of the stubs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import message_factory

from kata_pin.peers import proto
from kata_pin.peers.proto import nri_pb2
from tests.support import proto_modules

PROJECT = Path(__file__).resolve().parents[4]
FOLDERS = ("kata_pin/peers/proto", "tests/support/proto")


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_are_those_of_the_files(folder: str, tmp_path: Path) -> None:
    """scripts/proto writes them; a changed .proto file needs it."""
    pytest.importorskip("grpc_tools")
    files = sorted((PROJECT / folder).glob("*.proto"))
    made = tmp_path / "set"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROJECT / folder}",
         f"--descriptor_set_out={made}", *map(str, files)],
        check=True, timeout=50,
    )  # fmt: skip
    proto_modules.main(made, tmp_path)
    for file in files:
        name = f"{file.stem}_pb2.py"
        assert (tmp_path / name).read_text() == (PROJECT / folder / name).read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_of_a_stub_exists(folder: str) -> None:
    """What the type checker believes is there: messages, nested ones, values of enums."""
    for stub in (PROJECT / folder).glob("*.pyi"):
        module = importlib.import_module(f"{folder.replace('/', '.')}.{stub.stem}")
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found = getattr(module, node.name)
                for inner in (one for one in node.body if isinstance(one, ast.ClassDef)):
                    assert hasattr(found, inner.name), (stub, node.name, inner.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                assert hasattr(module, node.target.id), (stub, node.target.id)


@pytest.mark.skipif(not hasattr(message_factory, "GetMessageClass"), reason="protobuf is older")
def test_an_older_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 4.22 another class made them, from the same pool."""
    known = message_factory.GetMessageClass
    monkeypatch.delattr(message_factory, "GetMessageClass")

    class MessageFactory:
        def __init__(self, _pool: object) -> None:
            pass

        GetPrototype = staticmethod(known)

    monkeypatch.setattr(message_factory, "MessageFactory", MessageFactory, raising=False)
    before = nri_pb2.ConfigureRequest
    data = nri_pb2.DESCRIPTOR.serialized_pb
    proto.define(nri_pb2.__name__, data)
    assert nri_pb2.ConfigureRequest is before
