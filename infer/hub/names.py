"""Names of the Hub: `ORG/NAME[:VARIANT][@REVISION]`, and `hf:ORG/NAME[@REVISION]/PATH` for a part of a repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..regular_files import is_there

PREFIX = "hf:"
MAIN = "main"
_PART = r"[A-Za-z0-9][\w.-]*"
_BARE = re.compile(rf"(?P<repo>{_PART}/{_PART})(:(?P<variant>\w+))?(@(?P<revision>[\w./-]+))?")
_FULL = re.compile(
    rf"/?/?(?P<repo>{_PART}(/{_PART})?)(:(?P<variant>\w+))?(@(?P<revision>refs/[\w.-]+/[\w.-]+|[\w.-]+))?"
    r"(/(?P<inner>[^/].*?))?/?"
)
# Of paths of this machine: a name that ends so is no repository's, unless `hf:` says so.
SUFFIXES = frozenset(
    (".pt", ".pth", ".pt2", ".bin", ".ckpt", ".safetensors", ".onnx", ".gguf", ".npz", ".h5", ".pkl", ".zip")
    + (".json", ".infer", ".py")
)


@dataclass(frozen=True)
class HubName:
    """Name of a repository, or of a part of it.

    `revision`: branch, tag or commit, None for the main branch. `variant`: quantization of a GGUF file (Q4_K_M).
    `inner`: a file or folder in the repository.
    """

    repo: str
    revision: str | None = None
    variant: str = ""
    inner: str = ""

    @property
    def stem(self) -> str:
        """Name without organization and suffix, for what is made of the model."""
        part = Path(self.inner or self.repo)
        return part.stem if part.suffix.lower() in SUFFIXES else part.name

    def __str__(self) -> str:
        variant, revision = f":{self.variant}" * bool(self.variant), f"@{self.revision}" * bool(self.revision)
        inner = f"/{self.inner}" * bool(self.inner)
        prefix = PREFIX if self.inner or _BARE.fullmatch(self.repo) is None else ""
        return f"{prefix}{self.repo}{variant}{revision}{inner}"


def named(text: str) -> HubName | None:
    """Return the name that a text is, None where it names something on this machine.

    With `hf:` it always is one; without, where it has the form ORG/NAME and there is no such file or folder. Raises
    `UsageError` for `hf:` with anything but a name.
    """
    if not text.startswith(PREFIX):
        return bare_name(text) if not is_there(Path(text)) else None
    found = _FULL.fullmatch(text.removeprefix(PREFIX))
    if found is None or ".." in Path(found["inner"] or "").parts:
        raise UsageError(
            f"expected the name of a repository, got {text!r}",
            hint="Names are hf:ORG/NAME, hf:ORG/NAME@REVISION, hf:ORG/NAME/FILE",
        )
    return HubName(found["repo"], found["revision"], found["variant"] or "", found["inner"] or "")


def missing_hint(text: str) -> str:
    """Return the hint for a path that is absent: a single word may be the name of a repository without organization."""
    if re.fullmatch(_PART, text) and Path(text).suffix.lower() not in SUFFIXES:
        return f"Check the path, or give the whole name of a repository on the Hub: ORG/{text}, or {PREFIX}{text}"
    return "Check the path"


def bare_name(text: str) -> HubName | None:
    """Return the name that a text of the form ORG/NAME[:VARIANT][@REVISION] would be, whatever this machine has."""
    found = _BARE.fullmatch(text)
    if found is None or Path(found["repo"]).suffix.lower() in SUFFIXES:
        return None
    return HubName(found["repo"], found["revision"], found["variant"] or "")
