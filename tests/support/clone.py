"""Folders of the clone that the tests run in."""

from __future__ import annotations

from pathlib import Path


def main_worktree(root: Path) -> Path:
    """Return the clone's own working tree where `root` is one that `git worktree add` made, else `root`."""
    link = root / ".git"
    if not link.is_file():
        return root
    metadata = Path(link.read_text().removeprefix("gitdir:").strip())  # CLONE/.git/worktrees/NAME
    clone = metadata.parents[2]
    return clone if metadata.parents[1].name == ".git" and clone.is_dir() else root
