"""Observation of the fast path."""

from __future__ import annotations

import pytest

from infer.serve.fast_path.fast_request import FastRequest


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the bodies that the fast path gave back to the ordinary one."""
    bodies: list[bytes] = []
    fall_back = FastRequest.fall_back

    def counted(self):  # type: ignore[no-untyped-def]
        bodies.append(self.body)
        fall_back(self)

    monkeypatch.setattr(FastRequest, "fall_back", counted)
    return bodies


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the bodies that the fast path took."""
    bodies: list[bytes] = []
    begin = FastRequest.__init__

    def counted(self, connection, known, body, *rest):  # type: ignore[no-untyped-def]
        bodies.append(body)
        begin(self, connection, known, body, *rest)

    monkeypatch.setattr(FastRequest, "__init__", counted)
    return bodies
