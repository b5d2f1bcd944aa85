"""schemathesis goes through every route of the OpenAPI document, in process, with right and wrong requests.

A few examples of each kind; `make fuzz` runs hundreds, and sequences of requests too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="pip install 'infer-engine[dev]'")

from tests.fuzz import openapi_schema

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
EXAMPLES = 2


def test_the_openapi_document_holds_for_every_route_in_all_modes(tmp_path: Path) -> None:
    """Nothing but documented statuses, types and schemas; no 5xx; what breaks the schema is refused."""
    with openapi_schema.service(tmp_path) as (service, app):
        wrong, asked = openapi_schema.run(app, EXAMPLES)
        assert not wrong, "\n".join(wrong)
        routes = {f"{route.method} {route.path}" for route in service.routes}
        assert set(asked) == routes - {
            "GET /openapi.json"
        }  # which it leaves out, unless it is asked for alone
        assert sum(asked.values()) > 1000
        wrong, asked = openapi_schema.run(app, EXAMPLES, only="/openapi.json")
        assert not wrong, "\n".join(wrong)
        assert set(asked) == {"GET /openapi.json"}


def test_a_wrong_openapi_document_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.serve.http import openapi

    real = openapi.statuses
    monkeypatch.setattr(
        openapi, "statuses", lambda route, **more: [s for s in real(route, **more) if s != 404]
    )
    with openapi_schema.service(tmp_path) as (_, app):
        wrong, _ = openapi_schema.run(app, 1, only="/v2/models/{model}")
    assert any("status" in line for line in wrong)
