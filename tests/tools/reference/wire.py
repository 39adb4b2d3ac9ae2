"""Draws docs/reference/wire.md: the control plane's services and messages with the comments of the .proto files,
and the formats of bytes as the modules that pack them describe them."""

import ast
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc
from reference.table import cell, row, table

ROOT = Path(__file__).resolve().parents[3]
PROTOS = "comm/proto"
# Modules whose docstrings are formats of bytes, in the order of the page.
FORMATS = {
    "The data plane": "comm/transport/frames.py",
    "Encoded chunks": "comm/codecs/codec.py",
    "Sparse chunks": "comm/codecs/sparse.py",
    "Compressed bytes": "comm/codecs/zstd.py",
    "Receipts": "comm/receipts.py",
}
HEAD = """# Wire formats

What members of a run send each other and the coordinator: gRPC in protobufs for control, frames of Atoll's own for
the bytes of deltas and states. All of it is checked for length and form before memory is taken for it. A field
without a comment is what its name says. This page is made from the [.proto files](../../comm/proto/atoll.proto)
and the modules' docstrings by `make reference`.
"""
REPEATED = FieldDescriptorProto.Label.LABEL_REPEATED


class Proto:
    """One .proto file with its comments."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(place.path): cell(f"{place.leading_comments} {place.trailing_comments}")
            for place in file.source_code_info.location
        }

    def page(self) -> Iterator[str]:
        """The lines of its services, messages and enums."""
        yield f"\n## {Path(self.file.name).name}\n"
        yield self._comments.get((12,), "")  # of its line `syntax`
        for number, service in enumerate(self.file.service):
            yield f"\n### Service {self.file.package}.{service.name}\n"
            yield from table("call", "takes", "answers", "what")
            for at, call in enumerate(service.method):
                takes = f"{'stream ' * call.client_streaming}{_link(call.input_type)}"
                answers = f"{'stream ' * call.server_streaming}{_link(call.output_type)}"
                yield row(f"`{call.name}`", takes, answers, self._comments.get((6, number, 2, at), ""))
        for number, message in enumerate(self.file.message_type):
            yield from self._message(message, number)
        for number, enum in enumerate(self.file.enum_type):
            yield from self._enum(enum, number)

    def _message(self, message: DescriptorProto, number: int) -> Iterator[str]:
        yield f"\n### {message.name}\n"
        if said := self._comments.get((4, number)):
            yield f"{said}\n"
        if not message.field:
            yield "It has no fields."
            return
        yield from table("field", "number", "type", "meaning")
        for at, field in enumerate(message.field):
            kind = (
                _link(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
            )
            many = "repeated " * (field.label == REPEATED)
            said = self._comments.get((4, number, 2, at), "")
            if field.HasField("oneof_index"):
                said = f"one of `{message.oneof_decl[field.oneof_index].name}`{': ' * bool(said)}{said}"
            yield row(f"`{field.name}`", str(field.number), f"{many}{kind}", said)

    def _enum(self, enum: EnumDescriptorProto, number: int) -> Iterator[str]:
        yield f"\n### {enum.name}\n"
        yield from table("value", "number", "meaning")
        for at, value in enumerate(enum.value):
            yield row(f"`{value.name}`", str(value.number), self._comments.get((5, number, 2, at), ""))


def _link(kind: str) -> str:
    """A message's or an enum's name, as a link to where it stands on the page; empty for none."""
    name = kind.rpartition(".")[2]
    return f"[{name}](#{name.lower()})" if name else ""


def protos() -> list[Proto]:
    """The .proto files as the compiler reads them."""
    files = sorted(path.name for path in (ROOT / PROTOS).glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "descriptors"
        options = ["-I", str(ROOT / PROTOS), "--include_source_info", f"--descriptor_set_out={found}"]
        if protoc.main(["protoc", *options, *files]):
            raise ValueError(f"protoc does not read {PROTOS}")
        return [Proto(file) for file in FileDescriptorSet.FromString(found.read_bytes()).file]


def formats() -> Iterator[str]:
    """The lines of the modules' docstrings."""
    for title, path in FORMATS.items():
        said = ast.get_docstring(ast.parse((ROOT / path).read_text()))
        assert said is not None, path
        yield f"\n## {title}\n\nOf [{path}](../../{path}).\n\n{said}"


def draw() -> str:
    """The text of the page."""
    return HEAD + "\n".join([*(line for proto in protos() for line in proto.page()), *formats()]) + "\n"
