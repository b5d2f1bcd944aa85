"""Run schemathesis, all phases and modes, against an app in this process; `python -m tests.fuzz.openapi_schema [N]`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer.errors import NotReadyError
from infer.serve.http.app import build
from infer.serve.limits import ServeLimits
from infer.serve.service import Service
from tests.support import raw_http

CONFIG = """
workers = 1
[generation]
mode = "all"
max-examples = {examples}
deterministic = {fixed}
database = "none"
exclude-header-characters = "\\u0000"
[output.sanitization]
enabled = false
[phases.stateful]
enabled = {stateful}
[checks]
positive_data_acceptance.enabled = false
max_response_time = 30
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]  # a deadline of 1 ms is legal, and missed
"""
ANY_HEADER = "in header - object with unexpected properties"  # HTTP has no closed set of headers


class LoopBridge:
    """The app on a loop of its own, for callers that bring a new loop with every request."""

    def __init__(self, app: Any, home: asyncio.AbstractEventLoop) -> None:
        self._app, self._home = app, home

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        sent: list[Any] = []
        running = asyncio.run_coroutine_threadsafe(self._ask(dict(scope), body, sent), self._home)
        await asyncio.wrap_future(running)
        for message in sent:
            await send(message)

    async def _ask(self, scope: Any, body: bytes, sent: list[Any]) -> None:
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if given:
                return given.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)


@contextlib.contextmanager
def service(folder: Path, **options: Any) -> Iterator[tuple[Service, LoopBridge]]:
    """Every kind of model, ready, and the app in front of it."""
    limits = ServeLimits(timeout_seconds=20, generation_seconds=20)
    made = raw_http.models(folder)
    serving = Service(made, limits, **options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> None:
        serving.start()

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield serving, LoopBridge(build(serving), loop)
    finally:
        for model in serving.models.values():
            loop.call_soon_threadsafe(model.stop, NotReadyError("over"))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        serving.pool.shutdown()
        serving.grammars.shutdown()
        for model in made:
            model.close()


def run(
    app: Any, examples: int, *, fixed: bool = True, stateful: bool = False, only: str | None = None
) -> tuple[list[str], Counter[str]]:
    """Test every operation; return the faults and the number of requests by operation."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import events, from_schema

    text = CONFIG.format(examples=examples, fixed=str(fixed).lower(), stateful=str(stateful).lower())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=SchemathesisConfig.from_str(text))
    if only is not None:
        schema = schema.include(path=only)
    wrong, asked = list[str](), Counter[str]()
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            recorder = event.recorder
            for key, checks in recorder.checks.items():
                asked[recorder.cases[key].value.operation.label] += 1
                for check in checks:
                    if check.failure_info is not None and not _meant(check):
                        failure = check.failure_info.failure
                        label = recorder.cases[key].value.operation.label
                        curl = check.failure_info.code_sample[:800]
                        wrong.append(
                            f"{label}: {check.name}: {failure.title}: {failure.message[:400]}\n  {curl}"
                        )
        elif isinstance(event, events.NonFatalError | events.FatalError):
            wrong.append(str(event.__dict__)[:800])
    return wrong, asked


def _meant(check: Any) -> bool:
    """Return true for requests accepted on purpose (unknown headers, JSON declared as raw tensor bytes), and for those
    refused at once as their deadline, of 1 ms, would be missed.
    """
    info = check.failure_info
    if check.name == "not_a_server_error":
        return info.failure.status_code == 503 and "X-Request-Timeout-Ms" in info.code_sample
    return check.name == "negative_data_rejection" and (
        ANY_HEADER in info.failure.message or "Inference-Header-Content-Length" in info.code_sample
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as (_, app):
        wrong, asked = run(app, int(sys.argv[1]) if len(sys.argv) > 1 else 200, fixed=False, stateful=True)
    print("\n".join(wrong))
    for label, count in asked.items():
        print(f"{count:7d}  {label}")
    print(f"{sum(asked.values())} requests, {len(wrong)} failures")
    sys.exit(bool(wrong))
