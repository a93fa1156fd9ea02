"""Messages that are valid but for a field or two: what fuzzed bytes seldom are, and what gets furthest into a service."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
TEXTS = ("", " ", "x", "chat", "tiny", "../chat", "chat\n", "\x00", "é" * 200, "n" * 5000, "{}", "%s%n", "0")
NUMBERS = (0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
AnyMessage = TypeVar("AnyMessage", bound=Message)


def fields_of(message: Message) -> list[tuple[Message, Any]]:
    """Every field (its descriptor) of a message and of those within it, with the message that holds it."""
    found: list[tuple[Message, Any]] = []
    for field in message.DESCRIPTOR.fields:
        found.append((message, field))
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        value = getattr(message, field.name)
        inner = list(value)[:3] if _is_repeated(field) else [value] if message.HasField(field.name) else []
        for part in inner:
            found += fields_of(part)
    return found


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _odd(draw: Any, field: Any) -> object:
    """A value that the wire takes."""
    kind = field.cpp_type
    if kind in WHOLE:
        low, high = WHOLE[kind]
        edges = st.sampled_from([low, high, 0, 1, min(high, 1 << 31), min(high, (1 << 63) - 1)])
        return draw(edges | st.integers(low, high))
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw(st.sampled_from(NUMBERS))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return draw(st.booleans())
    return draw(st.binary(max_size=40)) if field.type == FieldDescriptor.TYPE_BYTES else draw(st.sampled_from(TEXTS))


def _break(draw: Any, holder: Message, field: Any) -> None:
    """Clear a field, give it an odd value, or repeat what it holds."""
    if field.message_type is not None:
        if _is_repeated(field) and len(values := getattr(holder, field.name)) and draw(st.booleans()):
            if not field.message_type.GetOptions().map_entry:
                values.extend(list(values)[: draw(st.integers(1, 4))])
        else:
            holder.ClearField(field.name)
    elif _is_repeated(field):
        values = getattr(holder, field.name)
        if len(values) and draw(st.booleans()):
            values[draw(st.integers(0, len(values) - 1))] = _odd(draw, field)
        else:
            values.extend(_odd(draw, field) for _ in range(draw(st.integers(1, 3))))
    else:
        setattr(holder, field.name, _odd(draw, field))


@st.composite
def broken(draw: Any, valid: AnyMessage) -> AnyMessage:
    """This message with one to three of its fields broken, at whatever depth."""
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(draw(st.integers(1, 3))):
        fields = fields_of(message)
        holder, field = fields[draw(st.integers(0, len(fields) - 1))]
        _break(draw, holder, field)
    return message
