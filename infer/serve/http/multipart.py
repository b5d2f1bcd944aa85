"""Bodies of multipart/form-data (RFC 7578), parsed by python-multipart in memory and within limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...errors import InputError, TooLargeError, UnsupportedMediaError
from ...sanitize import sanitize_text

FORM = "multipart/form-data"
MAX_PARTS = 64
MAX_HEADERS, MAX_HEADER_BYTES = 16, 4096  # of one part
MAX_FIELD_BYTES = 64 << 10  # of a part that is no file


class FilePart(NamedTuple):
    """A part with a file name."""

    filename: str
    data: bytes


@dataclass
class MultipartForm:
    """Parts by name: texts of fields and files, in the order of the body."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[FilePart]] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """Return a field that may be given once, or None; an empty one counts as absent."""
        values = self.fields.get(name, [])
        if len(values) > 1:
            raise InputError(f"expected one field {name}, got {len(values)}", where=name)
        return (values[0] or None) if values else None

    def file(self, name: str) -> bytes:
        """Return the data of the one file of that name; raise `InputError` for none or several."""
        found = self.files.get(name, [])
        if len(found) != 1:
            hint = f"{name} is a field without a file name here" if name in self.fields else ""
            raise InputError(
                f"expected one file in the field {name!r}, got {len(found)}", where=name, hint=hint
            )
        if not found[0].data:
            raise InputError("expected a file that is not empty", where=name)
        return found[0].data


def media_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the media type of a body, in lower case and without parameters; "" where none is given."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def parse_form(body: bytes | bytearray, headers: Mapping[bytes, bytes]) -> MultipartForm:
    """Parse a body of multipart/form-data.

    Raises `UnsupportedMediaError` for another media type or one without a boundary, `InputError` for a malformed body,
    `TooLargeError` for more than 64 parts or a field of more than 64 KiB.
    """
    media, options = parse_options_header(headers.get(b"content-type", b""))
    boundary = options.get(b"boundary", b"")
    if media.decode("latin-1") != FORM or not boundary:
        raise UnsupportedMediaError(
            f"expected {FORM} with a boundary", hint=f"Send Content-Type: {FORM}; boundary=…"
        )
    parts = _Parts(bytes(body))
    try:
        parser = MultipartParser(
            boundary, parts.callbacks(), max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES
        )
        parser.write(parts.body)
        parser.finalize()
    except (MultipartParseError, FormParserError) as error:
        raise InputError(f"malformed multipart body: {sanitize_text(str(error), 200)}") from error
    if not parts.ended:
        raise InputError("the multipart body ends before its last boundary")
    return parts.form


class _Parts:
    """Callbacks of the parser, which gather one part at a time."""

    def __init__(self, body: bytes) -> None:
        self.body, self.form, self.ended, self.count = body, MultipartForm(), False, 0
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._pieces: list[bytes] = []
        self._size = 0
        self._field = ""
        self._filename: str | None = None

    def callbacks(self) -> Any:
        names = (
            "part_begin",
            "part_data",
            "part_end",
            "header_field",
            "header_value",
            "header_end",
            "headers_finished",
        )
        return {**{f"on_{name}": getattr(self, f"_{name}") for name in names}, "on_end": self._end}

    def _part_begin(self) -> None:
        self.count += 1
        if self.count > MAX_PARTS:
            raise TooLargeError(f"expected at most {MAX_PARTS} parts of a form, got more")
        self._headers, self._pieces, self._size = {}, [], 0

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise InputError("expected Content-Disposition: form-data with a name in every part of the form")
        if self._headers.get(b"content-transfer-encoding", b"binary").lower() not in (
            b"binary",
            b"8bit",
            b"7bit",
        ):
            raise InputError("expected parts without Content-Transfer-Encoding")
        self._field = _decoded(options[b"name"])
        name = options.get(b"filename")
        self._filename = None if name is None else _decoded(name)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._filename is None and self._size > MAX_FIELD_BYTES:
            raise TooLargeError(f"expected at most {MAX_FIELD_BYTES} bytes of a field, got more")
        self._pieces.append(data[start:end])

    def _part_end(self) -> None:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        if self._filename is None:
            self.form.fields.setdefault(self._field, []).append(_decoded(data))
        else:
            self.form.files.setdefault(self._field, []).append(FilePart(self._filename, data))

    def _end(self) -> None:
        self.ended = True


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("expected fields of a form in UTF-8") from error
