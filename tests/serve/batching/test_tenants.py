"""Clients with different keys have separate prefix caches and learn nothing of others' prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("transformers")

from infer import Predictor
from infer.serve.http.access_control import ApiKeys
from infer.serve.http.request_context import RequestContext
from tests.support.fake_predictors import Live, live

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter has many to give
KEYS = ("key-of-alice", "key-of-bob")
SECRET = [7 + i % 90 for i in range(200)]


@pytest.fixture(scope="module")
def predictor(pydoc_artifact: Path) -> Iterator[Predictor]:
    with Predictor.load(pydoc_artifact, kv_memory="40MiB") as predictor:
        yield predictor


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Live]:
    with live(predictor, api_key=KEYS) as server:
        yield server


def cached(server: Live, name: str, key: str | None, prompt: Sequence[int], **asked: Any) -> int:
    """Complete a prompt; return the cached tokens of its usage."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": name, "prompt": list(prompt), "max_tokens": 1, **asked}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def test_prompt_of_another_key_is_not_a_cache_hit(server: Live, predictor: Predictor) -> None:
    alice, bob = KEYS
    assert cached(server, predictor.name, alice, SECRET) == 0
    assert cached(server, predictor.name, bob, SECRET) == 0
    assert cached(server, predictor.name, bob, [*SECRET[:150], 5], n=2) >= 100
    assert cached(server, predictor.name, alice, SECRET) >= 150


def test_prefix_cache_pages_are_found_by_their_tenant_only(server: Live, predictor: Predictor) -> None:
    alice, bob = KEYS
    page = predictor.language_model.shape.page
    secret = [100 + i % 70 for i in range(4 * page)]
    cached(server, predictor.name, alice, [*secret, 5])
    for pages in range(1, 5):
        assert (
            cached(server, predictor.name, bob, [*secret[: pages * page], 250 + pages]) == (pages - 1) * page
        )
    assert cached(server, predictor.name, alice, [*secret, 6]) == 4 * page


def test_cached_tokens_count_own_prompts_only(server: Live, predictor: Predictor) -> None:
    alice, bob = KEYS
    prompt = [20 + i % 11 for i in range(150)]
    cached(server, predictor.name, alice, prompt)
    asked = {"model": predictor.name, "prompt": prompt, "max_tokens": 1, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    said = httpx.post(f"{server.url}/v1/completions", json=asked, headers={"X-Api-Key": bob}, timeout=60).text
    assert '"prompt_tokens":150' in said
    assert not re.search(r'"cached_tokens":[1-9]', said)


def test_prefix_cache_can_be_shared_by_option(
    server: Live, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [30 + i % 13 for i in range(150)]
    monkeypatch.setattr(server.service, "share_prefix_cache", True)
    assert cached(server, predictor.name, KEYS[0], prompt) == 0
    assert cached(server, predictor.name, KEYS[1], prompt) >= 100


def test_clients_without_keys_share_the_prefix_cache(
    server: Live, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [40 + i % 17 for i in range(150)]
    monkeypatch.setattr(server.service, "keys", None)
    assert cached(server, predictor.name, None, prompt) == 0
    assert cached(server, predictor.name, None, prompt) >= 100


def test_tenant_name_does_not_reveal_the_key() -> None:
    keys, again = ApiKeys(KEYS), ApiKeys(KEYS)
    bearer, plain = {b"authorization": b"Bearer key-of-bob"}, {b"x-api-key": b"key-of-bob"}
    assert keys.tenant(bearer) == keys.tenant(plain) != keys.tenant({b"x-api-key": b"key-of-alice"})
    assert keys.tenant(bearer) != again.tenant(bearer)
    assert "bob" not in keys.tenant(bearer)


@pytest.mark.parametrize(
    ("client", "tenant"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_tenant_without_keys_is_the_client_address(client: str, tenant: str) -> None:
    service: Any = SimpleNamespace(keys=None)
    assert RequestContext(service, None, {}, {}, "", client=client).tenant == tenant  # type: ignore[arg-type]
