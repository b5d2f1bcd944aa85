"""The parsers of bodies under mutation, for a few seconds; `make fuzz` goes on for minutes."""

from __future__ import annotations

import contextlib
import random

import pytest

from infer.errors import InferError
from infer.serve.http import json_parse
from tests.fuzz import bodies


def test_mutated_request_bodies_crash_no_parser() -> None:
    ran = bodies.run(3, seed=1)
    assert set(ran) == set(bodies.TARGETS)
    assert min(ran.values()) > 20


@pytest.mark.parametrize("name", sorted(bodies.TARGETS))
def test_every_fuzz_target_accepts_or_refuses_its_valid_seed(name: str) -> None:
    for seed in bodies.SEEDS:
        with contextlib.suppress(InferError):
            bodies.TARGETS[name](seed, random.Random(0))


def test_the_fuzzer_detects_a_parser_that_accepts_duplicate_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_parse, "_refuse_duplicates", lambda document: None)
    with pytest.raises(AssertionError, match="duplicate key"):
        bodies.plain_json(b'{"a":1,"a":2}', random.Random(0))
