"""Chat template of an artifact: renders a conversation as the text that the model was trained on, in a sandbox.

Templates are Jinja, as transformers renders them: blocks trimmed, `{% break %}`, `{% generation %}`, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes. A template of a client is never rendered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...distribution import install
from ...errors import ArtifactError, InputError, NotUsableError, UsageError
from ...regular_files import MAX_JSON, read_regular
from ...spec import Finding
from .chat_messages import Message, plain, read

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
MAX_TEMPLATE, MAX_RENDERED, MAX_SECONDS = 1 << 18, 1 << 24, 1.0  # characters, characters, seconds
WITHOUT = "Give one: infer optimize … --chat-template FILE; completions need none"


class ChatTemplate:
    """Templates of an artifact by name ("default", "tool_use"); `tokens`: bos_token, eos_token and others."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str], where: str = "") -> None:
        self.sources, self.tokens, self._where = dict(sources), dict(tokens), where
        for name, source in self.sources.items():
            if len(source) > MAX_TEMPLATE:
                size = f"{len(source)} characters long, more than the {MAX_TEMPLATE}"
                raise ArtifactError(f"chat template {name!r} is {size} that are allowed", where=where)

    @classmethod
    def open(cls, folder: Path) -> ChatTemplate | None:
        """Read chat_template.jinja, additional_chat_templates and tokenizer_config.json; None without any."""
        config = read_json(folder / "tokenizer_config.json")
        sources = _listed(config.get("chat_template"))
        sources |= {path.stem: _template(path) for path in sorted((folder / FOLDER).glob("*.jinja"))}
        if (folder / FILE).is_file():
            sources["default"] = _template(folder / FILE)
        return cls(sources, special_tokens(folder), str(folder)) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a prompt, special tokens included: encode it with `special=False`.

        `continue_final_message` leaves the last message open instead of starting a new one. Raises `InputError` for
        messages that the template, or any, does not take.
        """
        chat = read(messages, knows_developer="developer" in self._source(tools))
        if continue_final_message:
            add_generation_prompt, chat = False, [*chat[:-1], _marked(chat[-1])]
        named = {"tools": plain(tools) if tools else None, "documents": None, **plain(variables)}
        named |= {"add_generation_prompt": add_generation_prompt, "messages": chat}
        text = self._run(self._name(tools), {**self.tokens, **named})
        return _cut(text) if continue_final_message else text

    def load(self) -> None:
        """Import the packages that rendering needs, without compiling a template."""
        _ = self._environment

    def check(self) -> None:
        """Raise `ArtifactError` for a template that does not parse."""
        for name in self.sources:
            self._compiled(name)

    def _name(self, tools: object) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))

    def _source(self, tools: object) -> str:
        return self.sources[self._name(tools)]

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        import jinja2

        pieces, size, start = [], 0, time.monotonic()
        try:
            for piece in self._compiled(name).generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED or time.monotonic() - start > MAX_SECONDS:
                    raise InputError("the conversation is too long for the chat template", where="messages")
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses this: {error}", where="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}"
            raise InputError(f"the chat template can't render this: {said}", where="messages") from error
        return "".join(pieces)

    def _compiled(self, name: str) -> Any:
        import jinja2

        if name not in self._templates:
            try:
                self._templates[name] = self._environment.from_string(self.sources[name])
            except (jinja2.TemplateError, RecursionError, ValueError, OverflowError, SyntaxError) as error:
                why = f"chat template {name!r} can't be read: {str(error)[:400]}"
                raise ArtifactError(why, where=self._where) from error
        return self._templates[name]

    @cached_property
    def _templates(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _environment(self) -> Any:
        if find_spec("jinja2") is None:
            raise NotUsableError("chat needs the package jinja2", hint=install("serve"))
        from .jinja_sandbox import environment

        return environment()


def carry(given: str | None, files: Mapping[str, Path]) -> tuple[dict[str, Path], list[Finding]]:
    """Return the files of the artifact by name, with the template of its folder or the one `given`.

    Raises `UsageError` or `ArtifactError` for a file that is no template.
    """
    config = files.get("tokenizer_config.json")
    if given is not None:
        try:
            text = _template(Path(given))
        except ArtifactError as error:
            raise UsageError(
                f"the chat template can't be read: {error.message}", where="--chat-template"
            ) from error
        ChatTemplate({"default": text}, {}, given).check()
        return {**files, FILE: Path(given)}, []
    if FILE not in files and not (config is not None and "chat_template" in read_json(config)):
        why = "the folder holds none: completions work, chat needs --chat-template FILE"
        return dict(files), [Finding("load", "chat template", False, why=why)]
    return dict(files), []


def special_tokens(folder: Path) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, … as text, from tokenizer_config.json or special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                found[key] = content
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_regular(path, MAX_JSON, error=ArtifactError))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"expected JSON: {error}", where=str(path)) from error
    return found if isinstance(found, dict) else {}


def _template(path: Path) -> str:
    try:
        return read_regular(path, 4 * MAX_TEMPLATE, error=ArtifactError).decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"a chat template is no UTF-8 text: {error}", where=str(path)) from error


def no_template(name: str) -> UsageError:
    return UsageError(f"{name} has no chat template, so it takes no messages", hint=WITHOUT)


def _listed(found: Any) -> dict[str, str]:
    """Read the templates of tokenizer_config.json: one, a list of {"name", "template"}, or by name."""
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        found = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
    named = found if isinstance(found, dict) else {}
    return {k: v for k, v in named.items() if isinstance(k, str) and isinstance(v, str)}


_END = "\U000f1f5f\U000f2a6d"  # private use: where the message that is continued ends


def _marked(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        raise InputError("the last message has no text to continue", where="messages")
    return {**message, "content": content + _END}


def _cut(text: str) -> str:
    if _END not in text:
        raise InputError("the chat template does not show the last message", where="messages")
    return text[: text.rindex(_END)]
