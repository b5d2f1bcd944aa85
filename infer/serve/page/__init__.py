"""The page at /: static files of the package; no build step, no external resources."""

from __future__ import annotations

from functools import cache
from importlib import resources

from ..http.routing import Response

MEDIA = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


@cache
def files() -> dict[str, bytes]:
    """Return the files by name; read once."""
    folder = resources.files(__name__)
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in MEDIA
    }


def index() -> Response:
    """Return the page for browsers; it holds no data of this server."""
    return Response(files()["index.html"], media=MEDIA["html"], headers=[*HEADERS, (b"vary", b"accept")])


def asset(name: str) -> Response | None:
    """Return one of its files, or None."""
    if name not in files():
        return None
    return Response(files()[name], media=MEDIA[name.rpartition(".")[2]], headers=list(HEADERS))
