"""`infer chat`: a conversation in the terminal, with the cost of each answer and a few commands."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import InputError
from ..llm.completion import Completion
from ..llm.text.tool_parser import ToolDelta, ToolParser, joined
from ..predict.predictor import Predictor

LONGEST_ANSWER = 1024
ROOM = 64  # tokens for an answer, below which old messages are left out
STOPPED = Text(" (stopped)", style="dim")
HELP = """\
/reset          forget the conversation
/system TEXT    set the system message; without TEXT: none
/stats          tokens and times so far, and the memory of the conversation
/exit           end the chat, like the end of input (Ctrl-D)
Ctrl-C          stop an answer; a line that ends with \\ continues on the next"""


class ChatSession:
    """One conversation, with the `options` of `Predictor.generate`.

    Of a pipe, each line is a message, and nothing but the answers goes to stdout.
    """

    def __init__(self, predictor: Predictor, system: str | None, options: dict[str, Any]) -> None:
        self.predictor, self.options = predictor, options
        self.system, self.turns = system, list[dict[str, str]]()
        self.answers: list[Completion] = []
        self.thinks = False  # the last text that was printed is a thought
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.console = Console(highlight=False, soft_wrap=True)
        self.notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Run the conversation until the end of input; raise `UsageError` for a model without a chat template."""
        language_model = self.predictor.language_model
        language_model.render_chat([{"role": "user", "content": "?"}])
        if self.terminal:
            if find_spec("readline"):
                import readline  # noqa: F401, PLC0415 - makes `input` edit lines

            self._print_note(
                f"{self.predictor.name}: {language_model.context} tokens of context. /help lists the commands"
            )
        while (line := self._read()) is not None:
            if line.startswith("/") and self._command(line):
                continue
            if line == "/exit":
                return
            if line:
                self._answer(line)

    def _read(self) -> str | None:
        """Read the next message, its lines joined; None at the end of input."""
        lines: list[str] = []
        while True:
            try:
                line = input(("… " if lines else "> ") if self.terminal else "")
            except EOFError:
                return "\n".join(lines).strip() if lines else None
            except KeyboardInterrupt:
                self.console.print()
                return ""
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).strip()
            lines.append(line[:-1])

    def _command(self, line: str) -> bool:
        """Run a command; return False for /exit, which the caller handles. Unknown ones get a message."""
        name, _, rest = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/help":
            self._print_note(HELP)
        elif name == "/reset":
            self.turns.clear()
            self._print_note("conversation cleared")
        elif name == "/system":
            self.system = rest.strip() or None
            self._print_note(f"system message: {self.system}" if self.system else "no system message")
        elif name == "/stats":
            self._print_note(self._statistics())
        else:
            self._print_note(f"no command named {name}; /help lists the commands")
        return True

    def _answer(self, line: str) -> None:
        self.turns.append({"role": "user", "content": line})
        try:
            options = {**self.options, "max_tokens": self._room()}
            parser = self._parser()
            stream = self.predictor.stream_chat(self._messages(), **options)
        except InputError as error:
            self.turns.pop()
            self.notes.print(Text(str(error), style="red"))
            return
        except KeyboardInterrupt:  # of a long prompt, before the answer began
            self.turns.pop()
            self.console.print(STOPPED)
            return
        parts: list[ToolDelta] = []
        with stream:
            try:
                for piece in stream:
                    parts += self._show(parser, piece.text, last=piece.finish_reason is not None)
            except KeyboardInterrupt:
                stream.close()
                self.console.print(STOPPED, end="")
        self.console.print()
        completion, parsed = stream.completion, joined(parts)
        completion.text, completion.reasoning = parsed.content or "", parsed.reasoning
        self.turns.append({"role": "assistant", "content": completion.text})
        self.answers.append(completion)
        if completion.finish_reason is not None and (why := completion.why_empty):
            self._print_note(why)
        if self.terminal:
            self.console.print(Text(_cost(completion), style="dim"))

    def _parser(self) -> ToolParser | None:
        """Return a parser of the answer to come; None where all of it is content."""
        model = self.predictor.language_model
        return model.parser(model.prompt_end(model.chat_ids(self._messages())), None)

    def _show(self, parser: ToolParser | None, text: str, *, last: bool) -> list[ToolDelta]:
        """Print a piece of an answer; thoughts are dimmed on a terminal, and left out of a pipe."""
        if parser is None:
            found = [ToolDelta(content=text)]
        else:
            found = [*parser.push(text), *(parser.finish() if last else ())]
        for part in found:
            if part.reasoning and self.terminal:
                self.console.print(Text(part.reasoning, style="dim"), end="")
                self.thinks = True
            elif part.content:
                self.console.print("\n\n" * self.thinks + part.content, end="", markup=False)
                self.thinks = False
        self.console.file.flush()
        return found

    def _messages(self, first: int = 0) -> list[dict[str, str]]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        return [*told, *self.turns[first:]]

    def _room(self) -> int:
        """Tokens left for the answer; drops the oldest messages while there are too few."""
        language_model = self.predictor.language_model
        wanted = self.options.get("max_tokens") or LONGEST_ANSWER
        for first in range(0, len(self.turns), 2):
            room = language_model.context - len(language_model.chat_ids(self._messages(first)))
            if room < min(wanted, ROOM) and (first < len(self.turns) - 1 or room < 1):
                continue
            if first:
                del self.turns[:first]
                full = f"the context of {language_model.context} tokens is full"
                self._print_note(f"{full}: the oldest {first} messages were dropped")
            return min(wanted, room)
        return 1  # the request will be refused as too long

    def _statistics(self) -> str:
        stats = self.predictor.engine_client.stats()
        lines = [f"{i}: {_cost(completion)}" for i, completion in enumerate(self.answers, 1)] or [
            "no answer yet"
        ]
        tokens = sum(len(completion.token_ids) for completion in self.answers)
        used, total = stats.cached_tokens, stats.pages_total * stats.page
        lines.append(f"{tokens} tokens answered; the KV cache holds {used} of {total} tokens")
        return "\n".join(lines)

    def _print_note(self, text: str) -> None:
        """Print a note beside the conversation, to stderr."""
        with contextlib.suppress(BrokenPipeError):
            self.notes.print(Text(text, style="dim"))


def _cost(completion: Completion) -> str:
    """Format the cost: `42 tokens, the first after 35 ms, then 210 tokens/s; prompt 120 tokens, 96 of them cached`."""
    parts = [f"{len(completion.token_ids)} tokens"]
    if completion.first_token_seconds is not None:
        parts.append(f"the first after {1e3 * completion.first_token_seconds:.0f} ms")
    if completion.tokens_per_second is not None:
        parts.append(f"then {completion.tokens_per_second:.1f} tokens/s")
    cached = f", {completion.cached_tokens} of them cached" if completion.cached_tokens else ""
    return f"{', '.join(parts)}; prompt {completion.prompt_tokens} tokens{cached}"
