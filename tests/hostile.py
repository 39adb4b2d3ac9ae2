"""What may come over a wire, drawn by hypothesis: any protobuf message of a kind, bytes that are nearly right."""

import math
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
REPEATED = 5  # elements at most
EDGES = [0, 1, 2, 7, (1 << 31) - 1, (1 << 32) - 1, (1 << 53), (1 << 63) - 1, (1 << 63), (1 << 64) - 1]
ENDS = [0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]
FLOATS = st.one_of(st.floats(), st.sampled_from([*ENDS, 5e-324, 1e-300, 2.2250738585072014e-308, 1e308]))
FLOATS_32 = st.one_of(st.floats(width=32), st.sampled_from([*ENDS, 2.0**-149, 2.0**-126, 2.0**127]))
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["n1", "n2", "n٣", "n" + "9" * 19, "ghost", "a" * 52, "\x1b[31m"])
)
BYTES = st.one_of(st.binary(max_size=40), st.binary(min_size=16, max_size=16))


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [edge for edge in (*EDGES, *(-edge for edge in EDGES)) if low <= edge <= high]
    return st.one_of(st.integers(0, 6), st.sampled_from(edges), st.integers(low, high))


def _field(field: Any) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_UINT32:
            return integers(0, (1 << 32) - 1)
        case FieldDescriptor.CPPTYPE_UINT64:
            return integers(0, (1 << 64) - 1)
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return integers(-(1 << 31), (1 << 31) - 1)
        case FieldDescriptor.CPPTYPE_INT64:
            return integers(-(1 << 63), (1 << 63) - 1)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return FLOATS
        case FieldDescriptor.CPPTYPE_FLOAT:
            return FLOATS_32
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_STRING:
            return BYTES if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
        case FieldDescriptor.CPPTYPE_MESSAGE:
            assert field.message_type is not None
            return messages(GetMessageClass(field.message_type))
    raise AssertionError(f"no strategy for {field.full_name}")


def messages(kind: type[M]) -> st.SearchStrategy[M]:
    """Any message of this kind: each field set or not, one of each oneof, all numbers that fit."""

    @st.composite
    def drawn(draw: st.DrawFn) -> M:
        fields: dict[str, Any] = {}
        descriptor = kind.DESCRIPTOR
        chosen = {draw(st.sampled_from([*oneof.fields, None])) for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            if field.containing_oneof is not None and field not in chosen:
                continue
            if field.is_repeated:
                fields[field.name] = draw(st.lists(_field(field), max_size=REPEATED))
            elif field.containing_oneof is not None or draw(st.booleans()):
                fields[field.name] = draw(_field(field))
        return kind(**fields)

    return drawn()


@st.composite
def nearly(draw: st.DrawFn, right: bytes) -> bytes:
    """Bytes that were right before some of them were changed, cut off, put in or doubled."""
    data = bytearray(right)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "drop":
                del data[at : at + draw(st.integers(1, 8))]
    return bytes(data)
