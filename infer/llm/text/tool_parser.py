"""Parser of a language model's output: content, thoughts and calls of tools, in streamed text.

One state machine for every form (`infer.llm.text.forms`). No part of a mark or of a call is returned as content, and
nothing else is lost: a call that can't be read, or that the text ends in before its name is known, is content, as are
calls in fenced code. In thoughts there are no calls. Arguments that are JSON are streamed as soon as the name is known,
others come whole. What is found does not depend on how the text is cut.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import msgspec

from .calls import Attempt, Begun, Message, Refused, Whole
from .calls.json_scan import JsonScan
from .forms import TAGS, Form, Thought
from .stop_strings import begin_at_end
from .tools import Tool

BLANKS = " \t\r\n"
_FENCE_SO_FAR = re.compile(r"^[ \t]*`+\Z", re.MULTILINE)


class ToolCall(msgspec.Struct, frozen=True):
    """Call of a tool."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolDelta(msgspec.Struct, frozen=True):
    """Content, reasoning, or a part of call number `index`: its first one carries `id` and `name`."""

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Parsed(msgspec.Struct):
    """A whole output; `content` and `reasoning` None: it has none."""

    content: str | None
    reasoning: str | None
    calls: list[ToolCall]


def joined(deltas: Iterable[ToolDelta]) -> Parsed:
    """Join the deltas of one output; blanks beside calls are no content."""
    content, reasoning, calls = "", "", list[ToolCall]()
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        if delta.index is not None and delta.index == len(calls):
            calls.append(ToolCall(delta.id or "", delta.name or "", delta.arguments))
        elif delta.index is not None:
            last = calls[delta.index]
            calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    blank = not content or (bool(calls) and content.isspace())
    return Parsed(None if blank else content, reasoning or None, calls)


class ToolParser:
    """State machine over the text of one output.

    `tools`: those that may be called; None: calls are content. `separate`: the marks of thoughts that are returned as
    reasoning; others stay in the content. `opened`: those of the thought in which the prompt ended. `complete` is False
    once a call's arguments ended too early or were no JSON.
    """

    def __init__(
        self,
        form: Form,
        tools: Sequence[Tool] | None,
        *,
        separate: Thought | None = None,
        opened: Thought | None = None,
    ) -> None:
        self.form, self.separate = form, separate
        self.schemas = {tool.name: tool.parameters for tool in tools or ()}
        self.calls, self.complete = 0, True
        self._marks = _marks_of(form, separate, tools is not None)
        self._bare = form.bare if tools is not None else ""
        self._text = ""  # not yet decided upon
        self._out: list[ToolDelta] = []
        self._ids: set[str] = set()
        self._last = False  # whether nothing comes after the text
        self._inside = False  # behind a call whose closing mark has not come
        self._listed = False  # in a list of calls
        self._new_line = True  # only blanks since the last line end of the content
        self._begins = True  # no content so far, but blanks
        self._behind_thought = False
        self._state: Callable[[], bool] = self._start
        if opened is not None:
            self._begin_thought(opened, separated=opened == separate)

    def push(self, text: str) -> list[ToolDelta]:
        self._text += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[ToolDelta]:
        """Return the text held back so far; called once, at the end of the output."""
        self._last = True
        return self.push("")

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's reason for the end: "tool_calls" in place of "stop", if there are calls to be made."""
        return "tool_calls" if reason == "stop" and self.calls and self.complete else reason

    @property
    def reasons(self) -> bool:
        """True within a thought that is returned as reasoning."""
        return self._state == self._in_thought and self._separated

    # States return whether another one may go on with the text.

    def _start(self) -> bool:
        """Look for a thought, or a call without a mark, at the beginning of the text and behind thoughts there."""
        rest = self._text.lstrip(BLANKS)
        if self._behind_thought:
            self._text = rest
        inner = rest[1:].lstrip(BLANKS) if rest[:1] == "[" and "[" in self._bare else rest
        if not self._last and (not inner or not begin_at_end(self._marks.all, rest)):
            return False
        if (thought := self._marks.thought_at(rest)) is not None:
            return self._meet_thought(thought, len(self._text) - len(rest))
        if inner and rest[0] in self._bare and not rest.startswith(self.form.opening):
            self._listed = rest[0] == "["
            return self._try_call(len(self._text) - len(inner), sure=False)
        return self._enter(self._content)

    def _content(self) -> bool:
        if not self._marks.within:
            self._show(len(self._text))
            return False
        for mark in self._marks.within.finditer(self._text):
            kind, start = mark.lastgroup, mark.start()
            if not self._last and not begin_at_end(self._marks.all, self._text[start:]):
                break
            if kind == "opening":
                self._show(len(self._text[:start].rstrip(BLANKS)))
                self._listed = mark[0].endswith("[")
                return self._try_call(self._text.index(mark[0]) + len(mark[0]), sure=True)
            if kind == "closing" and self._inside:
                return self._leave(start, len(mark[0]))
            if kind == "markup":
                self._show(start)
                self._text = self._text[len(mark[0]) :]
                return True
            if kind == "thought" and (thought := self._marks.thought_at(mark[0])) is not None:
                return self._meet_thought(thought, start)
            if kind == "fence" and (start or self._new_line):
                if mark.end() == len(self._text) and not self._last:
                    break
                self._fence = mark[0].lstrip()
                self._show(mark.end())
                return self._enter(self._code)
        if self._last:
            self._show(len(self._text.rstrip(BLANKS) if self.calls else self._text))
            self._text = ""
        else:
            self._show(self._num_decided())
        return False

    def _num_decided(self) -> int:
        """Return how many characters come before what may be the begin of a mark, and before the blanks there."""
        text = self._text
        fence = _FENCE_SO_FAR.search(text)
        stop = fence.start() if fence and (fence.start() or self._new_line) else len(text)
        return len(text[: min(stop, begin_at_end(self._marks.all, text))].rstrip(BLANKS))

    def _meet_thought(self, thought: Thought, start: int) -> bool:
        """Enter a thought whose mark is at `start`: reasoning, if nothing but thoughts came before."""
        separated = thought == self.separate and self._begins and not self._text[:start].strip(BLANKS)
        if separated:
            self._text = self._text[start + len(thought.start) :]
        else:
            self._show(start + len(thought.start))
        return self._begin_thought(thought, separated=separated)

    def _begin_thought(self, thought: Thought, *, separated: bool) -> bool:
        self._depth, self._thought, self._separated, self._fresh = 1, thought, separated, separated
        self._resume = self._start if separated else self._state
        return self._enter(self._in_thought)

    def _in_thought(self) -> bool:
        """Show everything until the thought ends, with those in it."""
        thought = self._thought
        if self._fresh:
            self._text = self._text.lstrip(BLANKS)
            while self._text.startswith(thought.start):  # which the prompt had already
                self._text = self._text[len(thought.start) :].lstrip(BLANKS)
            if thought.start.startswith(self._text) and not self._last:
                return False
            self._fresh = False
        for mark in _ends_of(thought).finditer(self._text):
            self._depth += 1 if mark[0] == thought.start else -1
            if not self._depth:
                if self._separated:
                    self._reason(mark.start())
                    self._text, self._behind_thought = self._text.lstrip(BLANKS)[len(mark[0]) :], True
                else:
                    self._show(mark.end())
                return self._enter(self._resume)
        show = self._reason if self._separated else self._show
        show(len(self._text) if self._last else begin_at_end((thought.start, thought.end), self._text))
        return False

    def _reason(self, count: int) -> None:
        """Return text of a thought, without the blanks at its end."""
        said = self._text[:count].rstrip(BLANKS)
        self._text = self._text[len(said) :]
        if said:
            self._out.append(ToolDelta(reasoning=said))

    def _code(self) -> bool:
        """Show fenced code until a fence of at least its length."""
        found = re.search(self._fence + "`*", self._text)
        if found and (found.end() < len(self._text) or self._last):
            self._show(found.end())
            return self._enter(self._content)
        self._show(len(self._text) if self._last else len(self._text.rstrip("`")))
        return False

    def _try_call(self, start: int, *, sure: bool, again: bool = False) -> bool:
        self._attempt = Attempt(self._text, start, self.schemas, sure=sure, again=again)
        return self._enter(self._call)

    def _call(self) -> bool:
        """Read a call by the first syntax of the form that can, behind blanks and the bracket of a list."""
        attempt = self._attempt
        attempt.text, attempt.last = self._text, self._last
        if not self._skip_bracket(attempt):
            return False if not self._last else self._not_a_call(Refused(attempt.begin))
        refused = Refused(attempt.begin)
        for syntax in self.form.syntaxes:
            reading = syntax.read(attempt)
            if reading is None:
                return False
            if not isinstance(reading, Refused):
                return self._take(reading)
            refused = reading if reading.stop > attempt.start else refused
        return self._not_a_call(refused)

    def _skip_bracket(self, attempt: Attempt) -> bool:
        """Move to where the call itself begins; return False while that is not known."""
        if attempt.placed:
            return True
        rest = self._text[attempt.start :].lstrip(BLANKS)
        if rest.startswith("[") and not self._listed:
            self._listed, rest = True, rest[1:].lstrip(BLANKS)
        attempt.start = attempt.scanned = len(self._text) - len(rest)
        attempt.placed = bool(rest)
        return attempt.placed

    def _take(self, reading: Begun | Whole | Message) -> bool:
        passed = self._text[: reading.stop]
        self._text = self._text[reading.stop :]
        if isinstance(reading, Message):
            self._state, thought = self._content, self.form.thought
            if not reading.thought or thought is None:
                return True
            separated = thought == self.separate
            if not separated:
                self._text = passed + self._text
                self._show(len(passed))
            return self._begin_thought(thought, separated=separated)
        ended = isinstance(reading, Whole) and passed.endswith(self.form.closing)
        self._inside = bool(self.form.closing) and not ended
        if isinstance(reading, Whole):
            for name, arguments in reading.calls:
                self._begin_call(name, None)
                self._out.append(ToolDelta(index=self.calls - 1, arguments=arguments))
            return self._enter(self._content if ended else self._after_call)
        self._begin_call(reading.name, reading.id)
        self._scan, self._enclosed = JsonScan(), reading.enclosed
        return self._enter(self._arguments)

    def _begin_call(self, name: str, given_id: str | None) -> None:
        prefix, digits = self.form.ids
        unique = given_id if given_id is not None and given_id not in self._ids else None
        number = unique or prefix + secrets.token_hex(12)[:digits]
        self._ids.add(number)
        self._out.append(ToolDelta(index=self.calls, id=number, name=name))
        self.calls += 1

    def _arguments(self) -> bool:
        self._text = self._text[self._scan.feed(self._text) :]
        if piece := self._scan.take():
            self._out.append(ToolDelta(index=self.calls - 1, arguments=piece))
        if self._scan.broken or (self._last and not self._scan.done):
            self.complete = False
            return self._scan.broken and self._enter(self._quoted)
        if not self._scan.done:
            return False
        self._scan, self._scanned = JsonScan(members=True), 0
        return self._enter(self._skip_rest if self._enclosed else self._after_call)

    def _skip_rest(self) -> bool:
        """Skip the rest of the JSON object that contains the arguments."""
        self._scanned = self._scan.feed(self._text, self._scanned)
        if not (self._scan.done or self._scan.broken or self._last):
            return False
        self._text = "" if self._last and not self._scan.broken and not self._scan.done else self._text
        self._text = self._text[self._scanned if self._scan.done else 0 :]
        return self._enter(self._after_call)

    def _after_call(self) -> bool:
        """Look for another call, or content, after a call."""
        rest = self._text.lstrip(BLANKS + ";,")
        if not rest:
            return self._wait_for_mark()
        brackets = ("]",) if self._listed else ()
        for mark in (*self.form.between, *self.form.closing, *brackets):
            if rest.startswith(mark):
                self._text = rest[len(mark) :]
                ends = mark not in self.form.between
                self._inside = self._inside and mark not in self.form.closing
                self._listed = self._listed and not ends
                return self._enter(self._behind_calls if ends else self._after_call)
            if mark.startswith(rest):
                return self._wait_for_mark()
        return self._try_call(len(self._text) - len(rest), sure=self._attempt.sure, again=True)

    def _wait_for_mark(self) -> bool:
        """Wait for the rest of a mark behind a call; a mark in which the text ends is no content either."""
        self._text = "" if self._last else self._text
        return False

    def _behind_calls(self) -> bool:
        """Pass a closing mark behind the list of calls."""
        rest = self._text.lstrip(BLANKS)
        for mark in self.form.closing if self._inside else ():
            if rest.startswith(mark):
                self._text, self._inside = rest[len(mark) :], False
            elif mark.startswith(rest):
                return self._wait_for_mark()
        if not rest and not self._last:
            return False
        self._text = "" if not rest else self._text
        return self._enter(self._content)

    def _quoted(self) -> bool:
        """Show what could not be read as a call until the closing mark; what it holds is no call."""
        for mark in self.form.closing:
            if (at := self._text.find(mark)) >= 0:
                if self._inside:
                    return self._leave(at, len(mark))
                self._show(at + len(mark))
                return self._enter(self._content)
        self._show(len(self._text) if self._last else begin_at_end(self.form.closing, self._text))
        return False

    def _leave(self, start: int, size: int) -> bool:
        """Show the text before a closing mark, without the blanks there, and drop the mark."""
        self._show(len(self._text[:start].rstrip(BLANKS)))
        self._text, self._inside = self._text.lstrip(BLANKS)[size:], False
        return self._enter(self._content)

    def _not_a_call(self, refused: Refused) -> bool:
        """Show the text that is no call, a character at least, lest it be taken for a call again."""
        if not self._attempt.again:
            self._show(max(refused.stop, 1))
        elif refused.stop > self._attempt.start:
            self._show(refused.stop)
        return self._enter(self._quoted if refused.broken and self._attempt.sure else self._content)

    def _show(self, count: int) -> None:
        text, self._text = self._text[:count], self._text[count:]
        if text:
            self._out.append(ToolDelta(content=text))
            line = text[text.rfind("\n") + 1 :]
            self._new_line = not line.strip(BLANKS) and ("\n" in text or self._new_line)
            self._begins = self._begins and text.isspace()

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True


class _Marks:
    """Marks that the content of a form may hold."""

    def __init__(self, form: Form, separate: Thought | None, tools: bool) -> None:
        opening = form.opening if tools or form.thought is not None else ()
        thoughts = {thought.start: thought for thought in TAGS if tools}
        thoughts |= {} if separate in (None, form.thought) else {separate.start: separate}
        self._thoughts = thoughts
        self.all = (*opening, *form.markup, *(form.closing if tools else ()), *thoughts)
        groups = {
            "opening": "|".join(map(re.escape, opening)),
            "closing": "|".join(map(re.escape, form.closing if tools else ())),
            "markup": "|".join(map(re.escape, form.markup)),
            "thought": "|".join(map(re.escape, thoughts)) if tools else "",
            "fence": rf"^[ \t]*(?!{'|'.join(map(re.escape, opening))})`{{3,}}" if tools else "",
        }
        pattern = "|".join(f"(?P<{name}>{marks})" for name, marks in groups.items() if marks)
        self.within = re.compile(pattern, re.MULTILINE) if pattern else None

    def thought_at(self, text: str) -> Thought | None:
        """Return the thought whose mark a text begins with."""
        return next((thought for mark, thought in self._thoughts.items() if text.startswith(mark)), None)


_marks_of = cache(_Marks)


@cache
def _ends_of(thought: Thought) -> re.Pattern[str]:
    return re.compile(f"{re.escape(thought.start)}|{re.escape(thought.end)}")
