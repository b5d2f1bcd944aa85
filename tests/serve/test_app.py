"""Promises of every route: request ids, methods, keys, errors, metrics, OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from infer.errors import UsageError
from infer.serve.http import openapi
from infer.serve.limits import ServeLimits
from infer.serve.service import Service
from tests.support.fake_predictors import Live, double, embedder, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(double(), embedder()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/version", "/openapi.json", "/docs", "/metrics", "/v2"]
)
def test_get_and_head_agree(client: httpx.Client, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert got.status_code == head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]


def test_links_of_the_home_page_exist(client: httpx.Client) -> None:
    home = client.get("/").json()
    assert home["models"] == ["double", "embedder"]
    for link in home["links"].values():
        assert client.get(link).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v2/models/double/infer", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v2/models/double", "GET, HEAD"),
        ("DELETE", "/v1/models/double", "GET, HEAD"),
        ("OPTIONS", "/v1/embeddings", "POST"),
        ("TRACE", "/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405_with_an_allow_header(
    client: httpx.Client, method: str, path: str, allow: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    assert "error" in answer.json()


@pytest.mark.parametrize("path", ["/nope", "/v2/nope", "/v2/", "/health/", "/%2e%2e/x", "/v2/models/a/b/c/d"])
def test_an_unknown_path_is_404_in_json(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json() == {"error": "no route has this path. /docs lists the routes"}
    assert client.get(f"/v1{path}").json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("asked", ["abc-1.2:3_x", "a" * 128])
def test_a_safe_request_id_is_echoed(client: httpx.Client, asked: str) -> None:
    assert client.get("/nope", headers={"X-Request-Id": asked}).headers["x-request-id"] == asked


@pytest.mark.parametrize("asked", ["a" * 129, "a b", 'a"b', "<x>", "", "ü"])
def test_any_other_request_id_is_replaced(client: httpx.Client, asked: str) -> None:
    given = client.get("/health", headers={"X-Request-Id": asked.encode()}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", given)


def test_openapi_lists_every_route_and_every_observed_status(client: httpx.Client, server: Live) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    routes = {(r.method.lower(), r.path) for r in server.service.routes}
    assert {(m, p) for p, methods in document["paths"].items() for m in methods} == routes
    text = json.dumps(document)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"]
    seen = [
        ("post", "/v2/models/{model}/infer", client.post("/v2/models/double/infer", content=b"{")),
        ("post", "/v2/models/{model}/infer", client.post("/v2/models/nope/infer", content=b"{}")),
        ("get", "/v2/models/{model}", client.get("/v2/models/nope")),
        ("get", "/v1/models/{model}", client.get("/v1/models/nope")),
        ("post", "/v1/embeddings", client.post("/v1/embeddings", json={"model": "nope", "input": "a"})),
        (
            "post",
            "/v1/embeddings",
            client.post("/v1/embeddings", content=b"a", headers={"content-type": "x/y"}),
        ),
    ]
    assert {answer.status_code for _, _, answer in seen} == {400, 404, 415}
    for method, path, answer in seen:
        assert str(answer.status_code) in document["paths"][path][method]["responses"]


def test_the_docs_page_loads_no_external_resource(client: httpx.Client, server: Live) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert all(route.path in page.text for route in server.service.routes)


def test_metrics_count_requests_by_code_and_api(client: httpx.Client) -> None:
    data = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    client.post("/v2/models/double/infer", json=data)
    text = client.get("/metrics").text
    assert 'infer_requests_total{api="kserve",code="200",model="double",version="1"}' in text
    assert 'infer_requests_total{api="ops",code="404",model="",version=""}' in text or "nope" not in text
    for name in ("requests_running", "requests_waiting", "queue_seconds_bucket", "compute_seconds_count"):
        assert f"infer_{name}{{" in text
    assert 'infer_dispatch_total{model="double",reason="idle",version="1"}' in text
    assert "infer_engine_heartbeat_age_seconds" in text
    assert 'infer_build_info{infer="' in text


def test_with_an_api_key_only_health_is_open() -> None:
    with live(double(), api_key="s3cret") as server, httpx.Client(base_url=server.url) as client:
        for path in ("/health", "/v2/health/live"):
            assert client.get(path).status_code == 200
        for path in (
            "/",
            "/ready",
            "/v2/health/ready",
            "/nope",
            "/metrics",
            "/v2",
            "/v2/models/double",
            "/openapi.json",
            "/docs",
        ):
            refused = client.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        refused = client.post("/v1/embeddings", json={})
        assert refused.json()["error"]["type"] == "authentication_error"
        assert client.get("/v2", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v2", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        document = client.get("/openapi.json", headers={"X-Api-Key": "s3cret"}).json()
        assert "401" in document["paths"]["/v2"]["get"]["responses"]
        assert "401" not in document["paths"]["/health"]["get"]["responses"]


def test_a_dead_engine_makes_health_and_readiness_503(caplog: pytest.LogCaptureFixture) -> None:
    fake = double()

    def die(inputs: Any) -> Any:
        raise SystemExit

    fake.function = die
    with live(fake) as server, httpx.Client(base_url=server.url) as client:
        data = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
        assert client.post("/v2/models/double/infer", json=data).status_code == 500
        for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready", "/v2/models/double/ready"):
            assert client.get(path).status_code == 503


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 129, "ünï", "a\n"])
def test_a_model_name_that_is_unsafe_in_a_url_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="invalid model name"):
        Service([double(name)])


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two models"):
        Service([double(), double()])


def test_limits_refuse_values_out_of_range() -> None:
    with pytest.raises(UsageError, match="max_body_bytes"):
        ServeLimits(max_body_bytes=0)
    assert ServeLimits(max_delay_us=0, drain_seconds=0).max_delay_us == 0


def test_every_protocol_is_a_plug_in_and_declares_its_statuses(server: Live) -> None:
    for route in server.service.routes:
        assert 500 in openapi.statuses(route, api_key=False)
        assert route.summary
