"""Compiler of grammars by llguidance, an Earley parser over bytes; needs no torch, so small processes can use it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ....errors import GrammarError, InputError, NotUsableError
from ..calls import CallGrammar, ValueGrammar
from .grammar_request import AnswerGrammar, FreeText, GrammarLimits, ToolCallGrammar, named
from .unique_items import without_unique_items

_WHITESPACE = r"[ \n\t]{1,32}"  # of JSON, between tokens: unbounded, a small model may never stop
_OPTIONS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE}
_MARKS = ("opening", "before", "after", "between", "closing")


class GrammarCompiler:
    """Makes matchers for one tokenizer. `vocab_size`: of the model, which may exceed the tokenizer's."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self.limits = limits or GrammarLimits()
        self.vocab_size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self._source, self._eos_ids = tokenizer, tuple(eos_ids)
        self._tokenizer: Any = None
        self._loading = threading.Lock()

    def compile(self, kind: str, value: Any) -> Any:
        """Return an `LLMatcher` in its first state; `InputError` names what is wrong or can't be enforced."""
        import llguidance

        what = named(kind, value)

        limits = llguidance.LLParserLimits(
            max_lexer_states=self.limits.lexer_states,
            max_items_in_row=self.limits.row_items,
            step_max_items=self.limits.step_items,
            step_lexer_fuel=self.limits.step_fuel,
            verbose_errors=False,
        )
        tokens = self.load()
        try:
            matcher = llguidance.LLMatcher(tokens, self._grammar(kind, value), log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some limits are noticed by the first mask only
        except ValueError as error:
            raise InputError(f"this {what} can't be read: {brief(str(error))}", where=kind) from error
        if matcher.is_error():
            raise GrammarError(f"this {what} can't be enforced: {brief(matcher.get_error())}", where=kind)
        return matcher

    def load(self) -> Any:
        """Convert the tokenizer to the library's form; raises `NotUsableError` if it can't be."""
        with self._loading:
            if self._tokenizer is None:
                import llguidance

                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._source.to_str(),
                        n_vocab=self.vocab_size,
                        eos_token=list(self._eos_ids) or None,
                    )
                except ValueError as error:
                    raise NotUsableError(
                        f"this tokenizer can't be constrained: {brief(str(error))}"
                    ) from error
            return self._tokenizer

    def _grammar(self, kind: str, value: Any) -> str:
        from llguidance import LLMatcher

        if kind in ("json_schema", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else without_unique_items(value)
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "grammar":
            return LLMatcher.grammar_from_lark(_lark(value))
        if kind == "answer":
            return LLMatcher.grammar_from_lark(self._answer(msgspec.convert(value, AnswerGrammar)))
        return LLMatcher.grammar_from_lark("\n".join(("start: answer", *self._rules(kind, value), "")))

    def _rules(self, kind: str, value: Any) -> list[str]:
        """Return rules of an `answer` under a constraint."""
        if kind in ("json_schema", "json_object"):
            return [f"answer: {_json({'type': 'object'} if kind == 'json_object' else value)}"]
        if kind == "regex":
            return [f"answer: /{_slashed(value)}/"]
        if kind == "choice":
            return ["answer: CHOICE", "CHOICE: " + " | ".join(map(json.dumps, value))]
        if kind == "grammar":
            return ["answer: %lark {", _lark(value), "}"]
        return self._calls(msgspec.convert(value, ToolCallGrammar))

    def _answer(self, answer: AnswerGrammar) -> str:
        ((kind, value),) = answer.grammar.items()
        rules, thought = self._rules(kind, value), ""
        if answer.end:
            start = "" if answer.opened else self._mark(answer.start)
            thought = f"{start} thought BLANKS {self._mark(answer.between)}"
            thought = thought if answer.opened else f"({thought})?"
            rules += [*self._until("thought", answer.end), r"BLANKS: /[ \n]{0,4}/"]
        return "\n".join((f"start: {thought} {self._mark(answer.prefix)} answer", *rules, ""))

    def _calls(self, calls: ToolCallGrammar) -> list[str]:
        marks = {name: self._mark(getattr(calls, name)) for name in _MARKS}
        free = calls.free or FreeText()
        first = self._mark((calls.opening or calls.before).removeprefix(free.mark))
        before = f"{first} {marks['before']} call" if calls.opening else f"{first} call"
        rules = self._kinds("call", calls.calls)
        if calls.free is not None and not free.mark and (lead := calls.opening + calls.before):
            # One term with the begin of a call: text may begin alike, and the library goes back to no shorter term.
            rules += self._kinds("first", [replace(call, before=lead + call.before) for call in calls.calls])
            before = "first"
        more = f"({marks['between']} {marks['before']} call {marks['after']}){{0,{calls.most - 1}}}"
        start = " ".join((before, marks["after"], more if calls.most > 1 else "", marks["closing"]))
        if calls.free is None:
            return [f"answer: {start}", *rules]
        never = "|".join([*free.never, *([re.escape(free.mark)] if free.mark else [])])
        rules.append(
            f"TEXT: /(?s:.*)/ & ~/(?s:.*)({_slashed(never)})(?s:.*)/" if never else "TEXT: /(?s:.*)/"
        )
        rules += self._until("free", free.mark) if free.mark else []
        for i, (begin, end) in enumerate(free.asides):
            rules += [f"aside{i}: {self._mark(begin)} aside_text{i}", *self._until(f"aside_text{i}", end)]
        asides = " | ".join(f"aside{i}" for i in range(len(free.asides)))
        asides = f"({asides})*" if asides else ""
        text = f"{'free' if free.mark else ''} {start} | {self._mark(free.before)} TEXT"
        return [f"answer: {asides} ({text})", *rules]

    def _kinds(self, name: str, calls: Sequence[CallGrammar]) -> list[str]:
        """Return the rules of a call of any tool."""
        kinds = " | ".join(f"{name}{i}" for i in range(len(calls)))
        return [
            f"{name}: {kinds}",
            *(rule for i, one in enumerate(calls) for rule in self._call(f"{name}{i}", one)),
        ]

    def _call(self, name: str, call: CallGrammar) -> list[str]:
        """Return the rules of a call: `first{i}` are its values from number i on, `more{i}` those behind others."""
        body, rules = _json(call.schema) if call.schema is not None else f"{name}_first0", list[str]()
        for i, value in enumerate(call.values if call.schema is None else ()):
            text = f"{name}_value{i}"
            rules += self._value(text, value)
            for start, before in (("first", ""), ("more", self._mark(call.separator))):
                rule = f"{before} {text} {name}_more{i + 1}"
                rules.append(
                    f"{name}_{start}{i}: {rule}" + ("" if value.required else f" | {name}_{start}{i + 1}")
                )
        if call.schema is None:
            rules += [f'{name}_{start}{len(call.values)}: ""' for start in ("first", "more")]
        return [f"{name}: {self._mark(call.before)} {body} {self._mark(call.after)}", *rules]

    def _value(self, name: str, value: ValueGrammar) -> list[str]:
        before, after = self._mark(value.before), self._mark(value.after)
        if value.schema is not None:
            return [f"{name}: {before} {_json(value.schema)} {after}"]
        if value.texts:
            return [f"{name}: {before} ({' | '.join(map(json.dumps, value.texts))}) {after}"]
        return [f"{name}: {before} {name}_text", *self._until(f"{name}_text", value.after)]

    def _until(self, name: str, mark: str) -> list[str]:
        """Return rules of any text until a mark, with the mark."""
        terms = self._mark(mark)
        if terms.startswith("<["):  # a special token, which no text matches
            return [f"{name}: {name.upper()} {terms}", f"{name.upper()}: /(?s:.*)/"]
        return [f"{name}[suffix={json.dumps(mark)}]: /(?s:.*)/"]

    def _mark(self, text: str) -> str:
        """Write text as terms of the grammar; special tokens of the tokenizer are required by their id."""
        terms, plain = list[str](), ""
        for piece in re.split(r"(<[^<>\s]{1,40}>|\[[A-Z_]+\])", text):
            number = self._source.token_to_id(piece) if piece else None
            if number is None or not self._tokenizer.is_special_token(number):
                plain += piece  # one term: the library goes back to no shorter one that ends before
                continue
            terms += [json.dumps(plain), f"<[{number}]>"] if plain else [f"<[{number}]>"]
            plain = ""
        return " ".join([*terms, json.dumps(plain)] if plain else terms)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**without_unique_items(schema), 'x-guidance': _OPTIONS})}"


def _slashed(expression: str) -> str:
    """Return a regular expression as it is written between slashes."""
    slashed = re.sub(r"\\.|/", lambda one: r"\/" if one[0] == "/" else one[0], expression, flags=re.DOTALL)
    return slashed.replace("\n", r"\n")


def _lark(text: str) -> str:
    """Return a grammar in the notation of Lark; one of GBNF (`name ::= …`) is converted."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except RecursionError as error:
        raise InputError("this grammar is nested too deeply to be read", where="grammar") from error
    except Exception as error:  # of no class of its own
        raise InputError(f"this grammar can't be read: {brief(str(error))}", where="grammar") from error


def brief(text: str) -> str:
    """Return the first line of a message of the library, at most 200 characters; later lines show the grammar."""
    return text.split("\n", 1)[0][:200]
