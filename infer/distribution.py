"""Name under which pip knows `infer`: the name `infer` itself is another project's on the package index."""

from __future__ import annotations

DISTRIBUTION = "infer-engine"


def install(extra: str) -> str:
    """Return the command that installs what an extra of pyproject.toml brings."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
