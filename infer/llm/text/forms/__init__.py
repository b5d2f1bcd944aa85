"""Forms of a language model's output: how it writes calls of tools and thoughts.

A file `NAME.py` defines `FORM`, a `Form`: data that the one parser (`infer.llm.text.tool_parser`) and the grammar of
calls (`infer.llm.text.tools.constrain`) read. The chat template of a model shows its form; an option names another one.
Third parties add a form by an entry point of the group `infer.forms` to such a module.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from .... import plugins
from ....errors import unknown
from ..calls import Syntax
from ..grammar.grammar_request import AnswerGrammar

FOLDER = "infer.llm.text.forms"
AUTO, NONE = "auto", "none"
USUAL = "hermes"  # of a template that shows no form


class Thought(msgspec.Struct, frozen=True):
    """Marks around a thought."""

    start: str
    end: str


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Form in which models of one kind write calls of tools.

    `shown_by`: regular expressions; a chat template that matches all of them is of this form, and of several forms the
    one with the most is taken. `opening`, `closing`: marks, each before and after calls. `syntaxes`: how a call is
    written; constraints use the first. `bare`: characters with which an output without `opening` may begin a call of a
    known tool. `between`: marks between calls; `markup`: marks that are no part of any content. `before`, `separator`,
    `after`: what constraints write around a call, if not `list_start` and `list_end` around all of them; `most`: calls.
    `ids`: the beginning and the number of digits of a call's id. `thought`: its own marks, whatever its template shows.
    `answer`: what constraints write before an answer that is no call; `asides`: before and after other messages, which
    may come first. `unmarked`: regular expressions of what may be a call without a mark, with NAMES of the tools.
    """

    shown_by: tuple[str, ...]
    syntaxes: tuple[Syntax, ...]
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    bare: str = ""
    between: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()
    list_start: str = ""
    before: str = ""
    separator: str = ""
    after: str = ""
    list_end: str = ""
    most: int = 16
    ids: tuple[str, int] = ("call_", 24)
    thought: Thought | None = None
    answer: str = ""
    asides: tuple[tuple[str, str], ...] = ()
    unmarked: tuple[str, ...] = ()


THOUGHTS = {
    "think": Thought("<think>", "</think>"),
    "thinking": Thought("<thinking>", "</thinking>"),
    "thought": Thought("<thought>", "</thought>"),
    "reasoning": Thought("<reasoning>", "</reasoning>"),
    "mistral": Thought("[THINK]", "[/THINK]"),
    "seed": Thought("<seed:think>", "</seed:think>"),
    "gemma": Thought("<|channel>thought\n", "<channel|>"),
    "granite": Thought("Here is my thought process:", "Here is my response:"),
    "cohere": Thought("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": Thought("◁think▷", "◁/think▷"),
}
TAGS = tuple(mark for mark in THOUGHTS.values() if re.fullmatch(r"\W.*\W", mark.start.strip()))


class Choice(msgspec.Struct, frozen=True):
    """Forms of a model's output, and by what each was chosen; `thought` None: thoughts stay in the content."""

    name: str
    form: Form
    why: str
    thought_name: str = NONE
    thought: Thought | None = None
    thought_why: str = ""

    def opened(self, prompt_end: str) -> Thought | None:
        """Return the marks of the thought that the end of a prompt begins, as templates of reasoning models do."""
        known = TAGS if self.thought is None else (self.thought, *TAGS)
        return next((one for one in known if prompt_end.endswith(one.start.rstrip())), None)

    def reads(self, *, tools: bool) -> bool:
        """Return False where an output is nothing but content."""
        return tools or self.thought is not None or bool(self.form.markup)

    def marks(self) -> tuple[str, ...]:
        """Return the marks that an output without tools may hold; they may be special tokens."""
        return (*self.form.markup, *((self.thought.start, self.thought.end) if self.thought else ()))

    def constrain(self, grammar: dict[str, Any] | None, prompt_end: str) -> dict[str, Any] | None:
        """Return a constraint on the answer as one on the whole output, which a thought may begin."""
        prefix = self.form.answer if grammar is not None and "calls" not in grammar else ""
        thought = self.thought
        if thought is not None and prompt_end.endswith(thought.end):  # the prompt has ended it
            thought = None
        if grammar is None or (thought is None and not prefix):
            return grammar
        answer = AnswerGrammar(
            grammar=grammar,
            start="" if thought is None else thought.start,
            end="" if thought is None else thought.end,
            opened=thought is not None and self.opened(prompt_end) == thought,
            between=self.form.separator if self.form.thought is not None else "",
            prefix=prefix,
        )
        return {"answer": msgspec.to_builtins(answer)}


def names() -> list[str]:
    """List the forms of calls."""
    return plugins.names(FOLDER)


def get(name: str) -> Form:
    """Return a form by its name; raises `UsageError` with the nearest one where there is none."""
    form: Form = plugins.get(FOLDER, name).FORM
    return form


@cache
def choose(template: str, tool_form: str = AUTO, reasoning_form: str = AUTO) -> Choice:
    """Choose the forms that a chat template shows, or those that are named."""
    name, why = (tool_form, "as --tool-form says") if tool_form != AUTO else _shown(template)
    form = get(name)
    thought_name, thought_why = reasoning_form, "as --reasoning-form says"
    if reasoning_form == AUTO:
        thought_name, thought_why = _shown_thought(template, name, form)
    if thought_name not in (NONE, *THOUGHTS, *([name] if form.thought is not None else [])):
        raise unknown("form of reasoning", thought_name, (NONE, *THOUGHTS))
    thought = form.thought if thought_name == name else THOUGHTS.get(thought_name)
    return Choice(name, form, why, thought_name, thought, thought_why)


def _shown(template: str) -> tuple[str, str]:
    """Return the name of the form that a template shows most of, and what shows it."""
    best: tuple[int, str, str] = (0, USUAL, "its chat template shows no form of calls: the usual one")
    for name in names():
        found = [re.search(mark, template) for mark in get(name).shown_by]
        if len(found) > best[0] and all(found):
            marks = " and ".join(repr(one[0]) for one in found if one is not None)
            best = (len(found), name, f"its chat template has {marks}")
    return best[1:]


def _shown_thought(template: str, name: str, form: Form) -> tuple[str, str]:
    if form.thought is not None:
        return name, f"belongs to the form {name}"
    for thought_name, thought in THOUGHTS.items():
        mark = next((mark for mark in (thought.start.strip(), thought.end) if mark in template), None)
        if mark is not None:
            return thought_name, f"its chat template has {mark!r}"
    return NONE, "its chat template shows no mark of a thought"
