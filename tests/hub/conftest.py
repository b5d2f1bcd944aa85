"""A Hub of the test's own, which huggingface_hub's real client asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_hub import LocalHub, local_hub, use


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub() as running:
        use(running, tmp_path / "hf", monkeypatch)
        yield running
