"""Host header check on loopback: DNS rebinding, proxies, and the message of the refusal."""

from __future__ import annotations

import httpx
import pytest

from infer.errors import UsageError
from infer.serve.http.access_control import AllowedHosts, allowed_hosts
from tests.support.fake_predictors import double, live
from tests.support.raw_http import ask, get
from tests.support.worker_models import serving

OWN = [
    "localhost",
    "LOCALHOST:8000",
    "app.localhost:1",
    "127.0.0.1:8000",
    "127.1.2.3",
    "[::1]:8000",
    "localhost.",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "",
]
FOREIGN += ["127.0.0.256", "127.0.0", "127.0.0.01", "127.1.2.3.4", "[127.0.0.1]", "[localhost]", "[::1"]
FOREIGN += ["localhost:65536", "127.0.0.1:999999", "a b.localhost", ".localhost", "a@localhost.localhost"]
FOREIGN += ["localhost@evil.example", "evil.example:80:80", "[::2]", "localhost, evil.example", "128.0.0.1"]


@pytest.mark.parametrize("host", OWN)
def test_loopback_names_are_accepted(host: str) -> None:
    assert AllowedHosts().admit(host.encode())


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_refused(host: str) -> None:
    assert not AllowedHosts().admit(host.encode())


def test_a_server_that_checks_hosts_refuses_an_invalid_address() -> None:
    with live(double(), hosts=AllowedHosts()) as server:
        for host, status in ((b"127.0.0.255", 200), (b"127.0.0.256", 421), (b"127.0.0.1:70000", 421)):
            assert ask(server, b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n").status == status


def test_allowed_names_are_accepted_with_any_port() -> None:
    hosts = AllowedHosts(["Api.Example", "10.0.0.1", "fd00::1"])
    for host in ("api.example", "api.example:443", "10.0.0.1:8000", "[fd00::1]:80"):
        assert hosts.admit(host.encode())
    assert not hosts.admit(b"other.example")
    with pytest.raises(UsageError, match="without a port"):
        AllowedHosts(["api.example:443"])


def test_hosts_are_checked_on_loopback_without_keys_or_on_request() -> None:
    assert allowed_hosts([], loopback=True, keys=False, bound="127.0.0.1") is not None
    assert allowed_hosts([], loopback=True, keys=True, bound="127.0.0.1") is None
    assert allowed_hosts([], loopback=False, keys=False, bound="0.0.0.0") is None  # noqa: S104
    assert allowed_hosts(["*"], loopback=True, keys=False, bound="127.0.0.1") is None
    told = allowed_hosts(["api.example"], loopback=False, keys=True, bound="10.0.0.7")
    assert told is not None
    assert told.admit(b"10.0.0.7:80")
    assert not told.admit(b"evil.example")


def test_a_foreign_host_is_refused_on_every_route_with_a_hint() -> None:
    with live(double(), hosts=AllowedHosts()) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/", "/health", "/metrics", "/v2/models/double", "/nowhere"):
            answer = client.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 421
            assert "--allow-host" in answer.json()["error"]
            assert client.get(path).status_code in (200, 404)
        bare = ask(server, b"GET /health HTTP/1.0\r\n\r\n")
        assert bare.status == 200
        assert ask(server, get(b"/health")).status == 421  # its Host is "a"


def test_infer_serve_checks_hosts_by_default() -> None:
    with serving() as (_, url):
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.get(f"{url}/ready", headers={"host": "evil.example"}).status_code == 421
