"""Mutations of the files of an artifact: bytes, values of JSON, headers of safetensors, fields of ONNX, zips."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0, "", "x", "a" * 5000, "\x1b[2J",
    "../../../etc/passwd", "/dev/zero", "\ud83d\ude00", "<script>alert(1)</script>", "{{ 7*7 }}", "NaN", [], {}, [[]],
    [None] * 40, {"a": {"b": {}}}, "float32", "cuda", "int64", [0], [1, 1], [-1, -1], [2**40, 2**40],
    "\u0000", "\u202e",
]  # fmt: skip
TOKENS = [
    b"", b"\x00", b"\xff", b"\xff\xfe", b"{", b"}", b"[", b'"', b"null", b"1e999", b"NaN", b"-", b"9" * 30, b"\x80" * 9,
    b"\x1b[31m", b"[" * 3000, b'{"a":' * 2000, b"PK\x03\x04", b"\x08\x07", b"\xef\xbb\xbf",
]  # fmt: skip


def any_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip bits, cut, double, or splice something that matters to a parser; now and then truncate."""
    made = bytearray(data)
    if chance.random() < 0.1:
        return bytes(made[: chance.randrange(len(made) + 1)])
    for _ in range(1 + chance.randrange(4)):
        at = chance.randrange(len(made) + 1)
        if chance.random() < 0.4:  # headers stand at the beginning
            at = min(at, chance.randrange(256))
        end = min(len(made), at + chance.randrange(16))
        kind = chance.randrange(5)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at:end]
        elif kind == 2:
            made[at:at] = made[at:end]
        elif kind == 3:
            made[at:end] = chance.choice(TOKENS)
        else:
            made[at:end] = chance.randbytes(end - at)
    return bytes(made)


def json_values(data: bytes, chance: random.Random) -> bytes:
    """Replace, drop, double or nest values anywhere in a JSON document."""
    try:
        found = json.loads(data)
    except ValueError:
        return any_bytes(data, chance)
    for _ in range(1 + chance.randrange(3)):
        found = _changed(found, chance)
    text = json.dumps(found).encode()
    if chance.random() < 0.1:  # a key that stands twice
        text = text.replace(b"{", b'{"format": 2, "name": [], ', 1)
    return text


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.93:
        key = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.08:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.12:
            return {**value, str(chance.choice(VALUES)): value[key]}
        return {**value, key: _changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        kind = chance.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return value + value[at:]
        return [*value[:at], _changed(value[at], chance), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.4:
        return chance.choice([value + 1, value - 1, -value, value << 8, value << 40])
    if chance.random() < 0.02:
        nested: Any = value
        for _ in range(600):
            nested = [nested]
        return nested
    return chance.choice(VALUES)


def safetensors_header(data: bytes, chance: random.Random) -> bytes:
    """Change a value of the header, whose length stays right; or bytes anywhere."""
    size = int.from_bytes(data[:8], "little")
    if chance.random() < 0.4 or size > len(data):
        return any_bytes(data, chance)
    header = json_values(data[8 : 8 + size], chance)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def onnx_fields(data: bytes, chance: random.Random) -> bytes:
    """Change fields of the model, which stays a model; or bytes anywhere."""
    import onnx

    if chance.random() < 0.4:
        return any_bytes(data, chance)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:  # noqa: BLE001 - mutated before
        return any_bytes(data, chance)
    for _ in range(1 + chance.randrange(3)):
        _change_message(model, chance)
    try:
        return model.SerializeToString()
    except Exception:  # noqa: BLE001 - what can't be written is no input
        return data


def _change_message(message: Any, chance: random.Random) -> None:
    """One field of a protobuf message, or of one inside it."""
    for _ in range(40):
        fields = message.ListFields()
        if not fields:
            return
        field, value = chance.choice(fields)
        repeated = not isinstance(value, str | bytes | int | float) and hasattr(value, "__len__")
        if repeated and len(value) and chance.random() < 0.15:
            at = chance.randrange(len(value))
            if chance.random() < 0.5:
                del value[at]
            else:
                value.append(value[at])
            return
        if field.message_type is not None:
            message = value[chance.randrange(len(value))] if repeated else value
            continue
        new = _scalar(value[0] if repeated else value, chance)
        try:
            if repeated:
                value[chance.randrange(len(value))] = new
            else:
                setattr(message, field.name, new)
        except (ValueError, TypeError):
            continue
        return


def _scalar(old: Any, chance: random.Random) -> Any:
    if isinstance(old, bytes):
        return any_bytes(old, chance)
    if isinstance(old, str):
        return chance.choice(
            [old + "x", "", "If", "Loop", "Reshape", "Expand", "../../etc/passwd", "/dev/zero", "MatMul", "x"]
        )
    if isinstance(old, float):
        return chance.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
    return chance.choice([0, 1, -1, 2, 7, 12, 127, 2**31 - 1, 2**40, -(2**62)])


def zip_members(data: bytes, chance: random.Random) -> bytes:
    """Mutate one member, checksums made right again; or bytes anywhere."""
    if chance.random() < 0.3:
        return any_bytes(data, chance)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return any_bytes(data, chance)
    name = chance.choice(list(members))
    change = json_values if members[name][:1] == b"{" and chance.random() < 0.8 else any_bytes
    if chance.random() < 0.1:
        members.pop(name)
    else:
        members[name] = change(members[name], chance)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue()


def mutation_for(name: str) -> Mutation:
    """Return the mutation specialised for a file, by its name."""
    if name.endswith(".json"):
        return lambda data, chance: (json_values if chance.random() < 0.7 else any_bytes)(data, chance)
    by_suffix: dict[str, Mutation] = {
        "safetensors": safetensors_header,
        "onnx": onnx_fields,
        "pt2": zip_members,
    }
    return by_suffix.get(name.rpartition(".")[2], any_bytes)
