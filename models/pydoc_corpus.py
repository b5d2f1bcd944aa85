"""Corpus of the English and the Python that CPython ships, as documents with a fixed held-out part.

Four kinds of document: `topic` (the language reference behind `help()`), `builtin` (docstrings of compiled
modules), `prose` (docstrings and comment blocks of one source file) and `code` (that file whole). The split
is by a hash of the topic's or file's name, the same on every machine; the text follows the Python version.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HELD_OUT_SHARE = {"topic": 0.10, "builtin": 0.05, "prose": 0.05, "code": 0.05}
SALT = "3"
# pydoc_data repeats every topic, held-out ones too; encodings and the files below are tables.
SKIPPED_FOLDERS = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "encodings",
        "pydoc_data",
        "_bundled",
        "__phello__",
        "turtledemo",
    )
)
SKIPPED_FILES = frozenset(("entities.py", "stringprep.py", "this.py", "antigravity.py"))
MAX_FILE_BYTES = 300_000


@dataclass(frozen=True)
class Document:
    name: str
    kind: str
    text: str
    held_out: bool


def is_held_out(name: str, kind: str) -> bool:
    """Split by the name alone: a module's code and prose always fall on the same side."""
    draw = int.from_bytes(hashlib.sha256(f"{SALT}:{name}".encode()).digest()[:8], "big") / 2**64
    return draw < HELD_OUT_SHARE[kind]


def corpus() -> list[Document]:
    """Return every document, sorted by kind and name.

    Nothing of a held-out document is in a training document: held-out modules give no code, and paragraphs that occur
    on both sides are cut from the training side.
    """
    found = [*_topics(), *_builtins(), *_sources()]
    found = [doc for doc in found if len(doc.text) >= 200 and not (doc.held_out and doc.kind == "code")]
    kept_apart = {key for doc in found if doc.held_out for key in _paragraph_keys(doc.text)}
    found = [doc if doc.held_out else replace(doc, text=_without(doc.text, kept_apart)) for doc in found]
    return sorted(found, key=lambda doc: (doc.kind, doc.name))


def _document(name: str, kind: str, text: str) -> Document:
    text = re.sub(r"[ \t]+\n", "\n", text.expandtabs(8).replace("\r\n", "\n").replace("\f", ""))
    return Document(name, kind, re.sub(r"\n{3,}", "\n\n", text).strip("\n"), is_held_out(name, kind))


def _key(paragraph: str) -> str:
    return re.sub(r"[\W_]+", " ", paragraph).strip().lower()


def _paragraph_keys(text: str) -> Iterator[str]:
    return (key for key in map(_key, text.split("\n\n")) if len(key) >= 40)


def _without(text: str, unwanted: set[str]) -> str:
    return "\n\n".join(part for part in text.split("\n\n") if _key(part) not in unwanted)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield _document(f"topic:{name}", "topic", text)


def _builtins() -> Iterator[Document]:
    """Return docstrings of modules written in C, which have no source file to read them from."""
    folder = Path(sysconfig.get_path("stdlib")) / "lib-dynload"
    compiled = {path.name.split(".")[0] for path in folder.glob("*.so")} | set(sys.builtin_module_names)
    for name in sorted(compiled):
        if "test" in name or name.startswith("xx"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except ImportError:
            continue
        yield _document(f"builtin:{name}", "builtin", "\n\n".join(_spoken(module)))


def _spoken(module: object) -> Iterator[str]:
    seen: set[str] = set()
    for name, value in sorted(vars(module).items()):
        members = [(name, value)]
        if inspect.isclass(value):
            members += [(f"{name}.{key}", each) for key, each in sorted(vars(value).items()) if key[0] != "_"]
        for label, each in members:
            text = inspect.getdoc(each) if callable(each) else None
            if text and len(text) > 30 and text not in seen:
                seen.add(text)
                yield f"{label}\n{text}"


def _sources() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if SKIPPED_FOLDERS & set(inside.parts) or path.name in SKIPPED_FILES:
            continue
        if path.name.startswith("_sysconfigdata") or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            code = path.read_text(encoding="utf-8")
            tree = ast.parse(code)
        except (UnicodeDecodeError, SyntaxError):
            continue
        name = "source:" + inside.as_posix()
        yield _document(name, "code", code)
        yield _document(name, "prose", "\n\n".join([*_docstrings(tree), *_comment_blocks(code)]))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) > 30:
                yield text


def _comment_blocks(code: str) -> Iterator[str]:
    """Yield runs of three or more comment lines: shorter ones read as labels, not as prose."""
    for block in re.findall(r"(?:^[ \t]*#.*\n){3,}", code, flags=re.MULTILINE):
        lines = [re.sub(r"^[ \t]*#+ ?", "", line) for line in block.splitlines()]
        if sum(map(len, lines)) > 120:
            yield "\n".join(lines)
