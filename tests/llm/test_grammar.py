"""Constraints on the output: what they let through, what they refuse, and what they cost a stranger."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.errors import GrammarError, InputError, NotUsableError, OverloadedError, UsageError

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

from infer.llm.text.grammar.grammar import GrammarCache, Matcher  # noqa: E402
from infer.llm.text.grammar.grammar_request import GrammarLimits  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "models" / "pydoc_lm"


def byte_level() -> Any:
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def sentence_piece() -> Any:
    """Make a tokenizer like Llama-2's: pieces with ▁ for a space, single bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *map(chr, range(33, 127)), "▁a", '":', "name", '{"']
    merges = [("▁", "a"), ('"', ":"), ("{", '"')]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)  # noqa: S106
    tokenizer = tokenizers.Tokenizer(model)
    replace = tokenizers.decoders.Replace("▁", " ")
    strip = tokenizers.decoders.Strip(" ", 1, 0)
    steps = [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), strip]
    tokenizer.decoder = tokenizers.decoders.Sequence(steps)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTES, PIECES = byte_level(), sentence_piece()
EOS = {id(BYTES): 0, id(PIECES): 2}
VOCAB = 4160  # more than either tokenizer has, as a padded head


@pytest.fixture(scope="module")
def grammars() -> GrammarCache:
    return GrammarCache(BYTES, VOCAB, [0])


def bitmask(matcher: Matcher, vocab: int = VOCAB) -> list[int]:
    """Return the allowed tokens."""
    words = torch.full((2, -(-vocab // 32)), -1, dtype=torch.int32)
    matcher.fill(words, 1)
    assert bool((words[0] == -1).all())
    bits = (words[1][:, None] >> torch.arange(32)) & 1
    return bits.flatten().nonzero().flatten().tolist()


def takes(matcher: Matcher, text: str, tokenizer: Any = BYTES) -> bool:
    """Tell if `text` is a complete output."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return all(matcher.accept(token) for token in ids) and matcher.complete


def wander(grammars: GrammarCache, tokenizer: Any, constraint: dict[str, Any], seed: int) -> str:
    """Random tokens out of the mask, the end token as soon as it may come after 200."""
    matcher, end, chance = grammars.open(constraint), EOS[id(tokenizer)], random.Random(seed)
    ids: list[int] = []
    while not matcher.finished:
        allowed = bitmask(matcher)
        assert allowed
        assert (end in allowed) == matcher.complete
        if end in allowed and (len(ids) > 80 or chance.random() < 0.3):
            break
        closing = [
            t for t in allowed if (tokenizer.id_to_token(t) or "").strip("▁Ġ") in {'"', "}", "]", "0", '"}'}
        ]
        token = chance.choice(closing if len(ids) > 40 and closing else [t for t in allowed if t != end])
        assert matcher.accept(token)
        ids.append(token)
        assert len(ids) < 2000
    return tokenizer.decode(ids, skip_special_tokens=False)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("seed", range(4))
def test_any_walk_through_the_mask_ends_in_json_valid_under_the_schema(tokenizer: Any, seed: int) -> None:
    grammars = GrammarCache(tokenizer, VOCAB, [EOS[id(tokenizer)]])
    value = json.loads(wander(grammars, tokenizer, {"json_schema": PERSON}, seed))
    assert set(value) - {"tags"} == {"name", "age", "kind"}
    assert 1 <= len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("cat", "dog")
    assert all(isinstance(tag, bool) for tag in value.get("tags", []))


@pytest.mark.parametrize("seed", range(2))
def test_the_json_object_format_gives_an_object(grammars: GrammarCache, seed: int) -> None:
    assert isinstance(json.loads(wander(grammars, BYTES, {"json_object": True}, seed)), dict)


GRAMMARS = {
    "lark": 'start: "{" word ("," word)* "}"\nword: /[b-d]+/ | "[" word "]"  // a comment }\n',
    "gbnf": 'root ::= "{" word ("," word)* "}"\nword ::= [b-d]+ | "[" word "]"\n',
}


@pytest.mark.parametrize("notation", GRAMMARS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_grammar_of_lark_or_gbnf_is_enforced(grammars: GrammarCache, notation: str, wrapped: bool) -> None:
    constraint: dict[str, Any] = {"grammar": GRAMMARS[notation]}
    if wrapped:
        constraint = {"answer": {"grammar": constraint, "start": "<think>", "end": "</think>"}}
    for text in ("{bcd}", "{b,[[c]],dd}", *(["<think>a {</think>{b}"] if wrapped else [])):
        assert takes(grammars.open(constraint), text), text
    for text in ("{}", "{a}", "{b,[c}", "b", "<think>a"):
        assert not takes(grammars.open(constraint), text), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "start: nope",
        'start: "a',
        "root ::= nope",
        'x ::= "a"',
        "root ::= " + "(" * 4000,
        "start: %json {",
    ],
)
def test_a_grammar_that_can_not_be_read_is_refused(grammars: GrammarCache, text: str) -> None:
    with pytest.raises(InputError) as caught:
        grammars.check({"grammar": text})
    assert caught.value.where == "grammar"


def test_a_choice_is_one_of_its_strings_and_a_longer_one_may_go_on(grammars: GrammarCache) -> None:
    constraint = {"choice": ["yes", "yes, but", 'a "quoted"\nline', "é😀"]}
    for text in constraint["choice"]:
        assert takes(grammars.open(constraint), text)
    assert not takes(grammars.open(constraint), "no")
    matcher = grammars.open(constraint)
    assert takes(matcher, "yes")
    assert not matcher.finished
    assert 0 in bitmask(matcher)


def test_a_regex_matches_the_whole_output(grammars: GrammarCache) -> None:
    constraint = {"regex": r"\d{3}-[a-f]+"}
    assert takes(grammars.open(constraint), "123-abc")
    assert not takes(grammars.open(constraint), "123-")
    assert not takes(grammars.open(constraint), "x123-abc")


def test_the_end_token_may_come_only_when_the_output_is_complete(grammars: GrammarCache) -> None:
    matcher = grammars.open({"choice": ["alpha beta"]})
    assert 0 not in bitmask(matcher)
    assert not matcher.accept(0)
    assert takes(matcher, "alpha beta")
    assert matcher.finished
    assert bitmask(matcher) == [0]
    assert matcher.accept(0)


def test_every_end_token_ends_a_constrained_output(grammars: GrammarCache) -> None:
    matcher = GrammarCache(BYTES, VOCAB, [0, 1]).open({"choice": ["a"]})
    assert takes(matcher, "a")
    assert bitmask(matcher) == [0, 1]


def test_a_refused_token_leaves_the_grammar_state_unchanged(grammars: GrammarCache) -> None:
    matcher = grammars.open({"regex": "ab+"})
    before = bitmask(matcher)
    for token in (0, BYTES.token_to_id("z"), 4159, VOCAB, 10**9, -1):
        assert not matcher.accept(token)
    assert bitmask(matcher) == before
    assert takes(matcher, "ab")


def test_rollback_restores_the_mask_of_each_position(grammars: GrammarCache) -> None:
    matcher = grammars.open({"json_schema": PERSON})
    ids = BYTES.encode('{"name": "Ada", "age": 36, "kind": "cat"}', add_special_tokens=False).ids
    masks = []
    for token in ids:
        masks.append(bitmask(matcher))
        assert matcher.accept(token)
    assert matcher.finished
    matcher.rollback(3)
    assert not matcher.finished
    assert bitmask(matcher) == masks[-3]
    matcher.rollback(len(ids) - 3)
    assert bitmask(matcher) == masks[0]


def test_completions_of_one_grammar_have_separate_states(grammars: GrammarCache) -> None:
    first, second = (grammars.open({"choice": ["ab", "cd"]}) for _ in range(2))
    assert takes(first, "ab")
    assert takes(second, "cd")


def test_tokens_the_tokenizer_lacks_are_never_allowed(grammars: GrammarCache) -> None:
    known = BYTES.get_vocab_size(with_added_tokens=True)
    assert max(bitmask(grammars.open({"regex": "(?s).*"}))) < known


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_masked() -> None:
    matcher = GrammarCache(BYTES, 4000, [0]).open({"regex": "[a-z]+"})
    assert max(bitmask(matcher, vocab=4000)) < 4000


def test_whitespace_of_json_is_bounded(grammars: GrammarCache) -> None:
    assert takes(grammars.open({"json_object": True}), '{\n    "a": 1\n}')
    assert not takes(grammars.open({"json_object": True}), "{" + " " * 64 + "}")


COLOUR = {"enum": ["red", "blue"], "type": "string", "title": "Colour"}


@pytest.mark.parametrize(
    ("array", "taken", "refused"),
    [
        ({"items": {"$ref": "#/$defs/Colour"}}, ["[]", '["red"]', '["blue","red"]'], ['["red","red"]']),
        (
            {"items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2},
            ["[3,1]"],
            ["[1]", "[1,1]", "[1,2,3]"],
        ),
        ({"items": {"const": "a"}}, ["[]", '["a"]'], ['["a","a"]']),
        ({"items": {"type": "integer"}, "maxItems": 1}, ["[]", "[7]"], ["[7,8]"]),
    ],
)
def test_items_of_few_values_are_unique(
    grammars: GrammarCache, array: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    inner = {"type": "array", "uniqueItems": True, "title": "Inner", **array}
    schema = {"$defs": {"Colour": COLOUR}, "type": "object", "properties": {"a": inner}, "required": ["a"]}
    for text in taken:
        assert takes(grammars.open({"json_schema": schema}), f'{{"a":{text}}}'), text
    for text in refused:
        assert not takes(grammars.open({"json_schema": schema}), f'{{"a":{text}}}'), text


def test_a_union_told_apart_by_a_field_is_one_of_its_branches(grammars: GrammarCache) -> None:
    def branch(kind: str, field: str) -> dict[str, Any]:
        properties = {"kind": {"const": kind, "type": "string"}, field: {"type": "integer"}}
        return {"type": "object", "properties": properties, "required": ["kind", field]}

    union = {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    }
    schema = {
        "$defs": {"Cat": branch("cat", "lives"), "Dog": branch("dog", "bones")},
        "type": "object",
        "properties": {"pet": union},
        "required": ["pet"],
        "additionalProperties": False,
    }
    assert takes(grammars.open({"json_schema": schema}), '{"pet":{"kind":"dog","bones":3}}')
    assert not takes(grammars.open({"json_schema": schema}), '{"pet":{"kind":"dog","lives":3}}')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [1, "1"]}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "frobnicate"}, "frobnicate"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "http://example.com/x.json"}, "example.com"),
        ({"$ref": "file:///etc/passwd"}, "passwd"),
        ({"type": "string", "pattern": "^(?=a)b"}, "regex"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "empty"),
    ],
)
def test_a_schema_keyword_that_can_not_be_enforced_is_refused_by_name(
    grammars: GrammarCache, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named) as caught:
        grammars.check({"json_schema": schema})
    assert caught.value.status == 422


@pytest.mark.parametrize(
    "constraint",
    [
        {},
        {"json_object": False},
        {"json_schema": "text"},
        {"json_schema": {"x-guidance": {"lenient": True}, "not": {}}},
        {"json_schema": {"const": float("nan")}},
        {"json_schema": {"const": {1, 2}}},
        {"json_schema": {"type": "integer", "maximum": 10**30}},  # which no message to a worker can carry
        {"regex": "["},
        {"regex": r"(a)\1"},
        {"regex": 5},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "abc"},
        {"calls": {"schema": 5}},
        {"regex": "a", "choice": ["b"]},
    ],
    ids=repr,
)
def test_an_invalid_constraint_is_refused(grammars: GrammarCache, constraint: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        grammars.check(constraint)


def test_an_unknown_kind_of_grammar_is_refused_with_the_known_ones(grammars: GrammarCache) -> None:
    with pytest.raises(UsageError, match="Did you mean regex"):
        grammars.check({"regx": "a"})


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"json_schema": nested(5000)},
    "large": {"json_schema": {"enum": [f"value-{i}" for i in range(100_000)]}},
    "wide": {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
    "alternatives": {
        "json_schema": {"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {"type": t}}} for k, t in
                                             (("a", "string"), ("b", "integer"))]} for i in range(20)]}
    },
    "intersections": {"json_schema": {"allOf": [{"type": "string", "pattern": f".*{c}.{{20}}"} for c in "abcdefgh"]}},
    "long": {"json_schema": {"type": "string", "minLength": 10**9}},
    "counted": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "loop": {"json_schema": {"$ref": "#"}},
    "doubling": {"json_schema": {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
                                 | {"d30": {"type": "object"}}, "$ref": "#/$defs/d0"}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_runs_within_bounds(grammars: GrammarCache, name: str) -> None:
    start = time.monotonic()
    try:
        matcher = grammars.open(HOSTILE[name])
        for _ in range(40):
            token = next(
                (t for t in bitmask(matcher) if (BYTES.id_to_token(t) or "") in {'"', "{", "a"}), None
            )
            if token is None or not matcher.accept(token):
                break
    except InputError as error:
        refusal = str(error)
        assert len(refusal) < 400  # noqa: PT017 - it may as well run
    assert time.monotonic() - start < 20  # a hang, not a speed, is looked for


def test_a_pattern_with_exponential_states_ends_its_completion_only() -> None:
    grammars = GrammarCache(BYTES, VOCAB, [0], GrammarLimits(lexer_states=300))
    constraint = {"regex": "(.*a.{40})(b|c)*"}
    matcher = grammars.open(constraint)
    chance = random.Random(1)
    letters = [BYTES.token_to_id(letter) for letter in "ab"]

    def go_on() -> None:
        while matcher.accept(chance.choice(letters)):
            pass

    with pytest.raises(GrammarError, match="too complex"):
        go_on()
    with pytest.raises(GrammarError, match="too complex"):
        bitmask(matcher)
    assert not matcher.finished
    assert not matcher.complete
    assert bitmask(grammars.open(constraint))  # the one that broke is not what others get


def test_a_slow_grammar_compilation_times_out_and_keeps_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = GrammarCache(BYTES, VOCAB, [0], GrammarLimits(compile_seconds=0.05, compiling=1))
    done = threading.Event()
    monkeypatch.setattr(grammars._compiler, "compile", lambda kind, value: done.wait(60))
    with pytest.raises(InputError, match="takes longer than 0.05 s"):
        grammars.check({"json_object": True})
    with pytest.raises(OverloadedError, match="other grammars"):
        grammars.check({"choice": ["a"]})
    assert len(grammars) == 0
    done.set()
    monkeypatch.undo()
    grammars._compiling.acquire(timeout=60)
    grammars._compiling.release()
    assert grammars._compiler.compile("choice", ["a"])


def test_the_cache_keeps_the_constraints_used_last() -> None:
    grammars = GrammarCache(BYTES, VOCAB, [0], GrammarLimits(cached=2))
    for text in ("a", "b", "a", "c"):
        grammars.check({"choice": [text]})
    assert len(grammars) == 2
    grammars._compiler = None  # type: ignore[assignment]
    grammars.check({"choice": ["a"]})


def test_the_cache_and_all_grammars_in_use_stay_within_their_memory() -> None:
    limits = GrammarLimits(cached_bytes=64 << 20, used_bytes=96 << 20)
    grammars = GrammarCache(BYTES, VOCAB, [0], limits)
    for text in ("a", "b", "c", "d"):
        grammars.check({"choice": [text]}, 20 << 20)
    assert len(grammars) == 2
    used = [grammars.open({"choice": [text]}) for text in ("c", "d")]
    with pytest.raises(OverloadedError, match="memory"):
        grammars.check({"choice": ["e"]}, 60 << 20)
    used.clear()
    grammars.check({"choice": ["e"]}, 60 << 20)


def test_a_grammar_in_use_is_not_compiled_again_after_its_eviction(grammars: GrammarCache) -> None:
    grammars = GrammarCache(BYTES, VOCAB, [0], GrammarLimits(cached=1))
    first = grammars.open({"choice": ["a"]})
    grammars.check({"choice": ["b"]})
    grammars._compiler = None  # type: ignore[assignment]
    assert takes(grammars.open({"choice": ["a"]}), "a")
    assert takes(first, "a")


def test_a_grammar_of_the_empty_output_ends_at_once(grammars: GrammarCache) -> None:
    matcher = grammars.open({"regex": ""})
    assert bitmask(matcher) == [0]
    assert matcher.accept(0)
    assert not matcher.accept(0)
    matcher.rollback(1)
    assert matcher.complete


def test_schemas_that_differ_in_the_order_of_their_keys_differ(grammars: GrammarCache) -> None:
    one = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    two = {"type": "object", "properties": {"b": {"const": 2}, "a": {"const": 1}}, "required": ["a", "b"]}
    assert takes(grammars.open({"json_schema": one}), '{"a":1,"b":2}')
    assert takes(grammars.open({"json_schema": two}), '{"b":2,"a":1}')


def test_a_tokenizer_without_byte_tokens_is_refused() -> None:
    model = tokenizers.models.WordLevel({"<unk>": 0, "hello": 1, "</s>": 2}, unk_token="<unk>")  # noqa: S106
    with pytest.raises(NotUsableError, match="can't be constrained"):
        GrammarCache(tokenizers.Tokenizer(model), 3, [2]).check({"choice": ["hello"]})


def test_special_tokens_in_tool_calls_are_required_by_id(grammars: GrammarCache) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    calls = {
        "calls": [{"before": "", "schema": schema}],
        "before": "<tool_call>\n",
        "after": "\n</tool_call>",
        "between": "\n",
        "most": 2,
    }
    matcher = grammars.open({"calls": calls})
    assert bitmask(matcher) == [BYTES.token_to_id("<tool_call>")]
    one = '<tool_call>\n{"x": 1}\n</tool_call>'
    assert takes(matcher, one)
    assert takes(matcher, f"\n{one}")
    assert matcher.finished
