"""Message classes of a .proto file, made as it is read: generated code would bind to one version of protobuf."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

WORD = re.compile(r'"[^"]*"|[\w.]+|[{}()=;<>,]')
SCALARS = ("double", "float", "int64", "uint64", "int32", "bool", "string", "bytes", "uint32")


def message_classes(path: Path) -> dict[str, type[Message]]:
    """Return the classes of a file's messages, by name.

    Of proto3 it reads messages, fields, `repeated`, `map`, `oneof` and enums: what such a file of ours holds. They
    live in a pool of their own, beside the classes that a program may have generated from the same names.
    """
    words = iter(WORD.findall(re.sub(r"//.*", "", path.read_text(encoding="utf-8"))))
    file = FileDescriptorProto(name=path.name, syntax="proto3")
    for word in words:
        if word == "package":
            file.package = next(words)
        elif word == "message":
            _read_message(words, file.message_type.add(name=next(words)))
        elif word == "enum":
            _read_enum(words, file.enum_type.add(name=next(words)))
        elif word == "service":
            _skip_block(words)
    pool = DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}


def _read_message(words: Iterator[str], message: DescriptorProto) -> None:
    """Read fields and messages up to the brace that closes this one."""
    depth = 0
    for word in words:
        if word == "{":
            depth += 1
        elif word == "}":
            depth -= 1
            if not depth:
                return
        elif word == "message":
            _read_message(words, message.nested_type.add(name=next(words)))
        elif word == "oneof":
            message.oneof_decl.add(name=next(words))
        elif word != ";":
            field = message.field.add(label=FieldDescriptorProto.LABEL_OPTIONAL)
            if word in ("repeated", "map"):
                field.label = FieldDescriptorProto.LABEL_REPEATED
            if depth == 2:
                field.oneof_index = len(message.oneof_decl) - 1
            if word == "map":
                _, key, _, value, _ = (next(words) for _ in range(5))
                field.name = next(words)
                entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                for number, (name, kind) in enumerate((("key", key), ("value", value)), 1):
                    part = entry.field.add(
                        name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL
                    )
                    _set_type(part, kind)
                _set_type(field, entry.name)
            else:
                _set_type(field, next(words) if word == "repeated" else word)
                field.name = next(words)
            _, number_text = next(words), next(words)
            field.number = int(number_text)


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = kind


def _read_enum(words: Iterator[str], enum: EnumDescriptorProto) -> None:
    for word in words:
        if word == "}":
            return
        if word not in ("{", ";"):
            _, number = next(words), next(words)
            enum.value.add(name=word, number=int(number))


def _skip_block(words: Iterator[str]) -> None:
    depth = 0
    for word in words:
        depth += (word == "{") - (word == "}")
        if word == "}" and not depth:
            return
