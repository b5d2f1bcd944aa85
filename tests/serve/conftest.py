"""Clients of the server that a test file starts as its own `server` fixture."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.fake_predictors import Live


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the file's `server`."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def raw(server: Live) -> Iterator[httpx.Client]:
    """HTTP client of the file's `server`, for what OpenAI's client does not send."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client
