"""A grammar that fails while it is used: the client is told that its grammar is the cause, others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from infer.errors import GrammarError
from infer.llm.completion import raise_error
from infer.llm.engine.requests import Output
from tests.llm.test_engine_loop import drive, engine, letters, request, tokens
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import Live, live


class Breaks:
    """Allows even tokens; the method `where` raises, or allows nothing, once `left` tokens came."""

    finished = False

    def __init__(self, where: str, left: int) -> None:
        self.where, self.left = where, left

    def fill(self, bitmask: Tensor, row: int) -> None:
        if self.left == 0 and self.where == "fill":
            raise GrammarError("the grammar became too complex")
        bitmask[row] = 0 if self.left == 0 and self.where == "empty" else 0x55555555

    def accept(self, token: int) -> bool:
        self.left -= 1
        if self.left == 0 and self.where == "accept":
            raise GrammarError("the grammar became too complex")
        return True

    def rollback(self, count: int) -> None:
        self.left += count


class Broken:
    def check(self, constraint: Any) -> None:
        pass

    def open(self, constraint: Any) -> Breaks:
        return Breaks(*constraint["breaks"])


@pytest.mark.parametrize("where", ["fill", "accept", "empty"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_grammar_that_fails_late_ends_its_own_request_as_its_fault(where: str, n: int) -> None:
    running = engine(grammars=Broken())
    bad = request("bad", letters(5), max_tokens=30, n=n)
    bad.grammar = {"breaks": [where, 3]}
    running.submit(bad)
    running.submit(request("free", letters(5), max_tokens=9))
    outputs = drive(running)
    last = [output for output in outputs if output.id == "bad" and output.finish is not None]
    assert {(output.index, output.finish, output.fault) for output in last} == {
        (i, "error", "GrammarError") for i in range(n)
    }
    assert len(tokens(outputs, "free")) == 9
    running.check_integrity()


def test_raise_error_maps_a_fault_to_a_grammar_error() -> None:
    with pytest.raises(GrammarError, match="too complex"):
        raise_error(Output(id="a", index=0, finish="error", stopped_by="too complex", fault="GrammarError"))


class Late(FakeEngine):
    """Says a letter; then the grammar fails."""

    def _go_on(self, request: Any, made: int) -> list[Output]:
        if made and request.grammar:
            self.cancel(request.id)
            output = Output(
                id=request.id, index=0, finish="error", stopped_by="too complex", fault="GrammarError"
            )
            return [output]
        return super()._go_on(request, made)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(FakeLLMPredictor(tmp_path_factory.mktemp("late"), "late", engine=Late())) as server:
        yield server


ASK = {"model": "late", "max_tokens": 9, "response_format": {"type": "json_object"}}
ROUTES = [
    ("/v1/completions", {**ASK, "prompt": "x"}),
    ("/v1/chat/completions", {**ASK, "messages": [{"role": "user", "content": "x"}]}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_response_whose_grammar_fails_late_is_422(server: Live, route: str, body: dict[str, Any]) -> None:
    answer = httpx.post(server.url + route, json=body)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_schema")
    assert "too complex" in error["message"]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_stream_whose_grammar_fails_late_ends_with_the_client_s_error(
    server: Live, route: str, body: dict[str, Any]
) -> None:
    answer = httpx.post(server.url + route, json={**body, "stream": True})
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    error = json.loads(lines[-1])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_schema")


@pytest.mark.parametrize("pattern", ["a{1000000}", "((a{1,1000}){1,1000}){1,1000}"])
def test_a_matcher_beyond_its_limit_raises(pattern: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("llguidance")
    from infer.llm.text.grammar.grammar import GrammarCache
    from infer.llm.text.grammar.grammar_request import GrammarLimits

    path = Path(__file__).resolve().parents[2] / "models/pydoc_lm/tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    limits = GrammarLimits(compile_seconds=120)  # a busy machine decides nothing here
    cache, letter = GrammarCache(tokenizer, 4096, [0], limits), tokenizer.token_to_id("a")
    matcher = cache.open({"regex": pattern})

    def go_on() -> None:
        for _ in range(10_000):
            assert matcher.accept(letter)

    with pytest.raises(GrammarError, match="too complex"):
        go_on()
