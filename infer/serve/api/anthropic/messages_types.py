"""JSON schemas of /v1/messages: the request and its blocks, the message that replies, the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...generation.request_fields import Stop, option

Block = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Thoughts before the answer. `budget_tokens` is a target below `max_tokens`, which alone is enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Form of the answer, and the effort of thoughts, which goes to the model's chat template."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens; a field that is not here, and asks for something, is refused.

    `cache_control`, here and in blocks and tools, asks for what is always done: prompts that begin alike share pages.
    """

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Block], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Block | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages; `max_tokens` may be more than fits; `priority` and `timeout` are this server's own."""

    max_tokens: Annotated[int, option("max_tokens"), Meta(ge=1)]
    stop_sequences: Annotated[Annotated[list[Stop], Meta(max_length=16)] | None, option("stop_sequences")] = (
        None
    )
    temperature: Annotated[float | None, option("temperature")] = None
    top_p: Annotated[float | None, option("top_p")] = None
    top_k: Annotated[int | None, option("top_k")] = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    priority: Annotated[int | None, option("priority")] = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class TextInput(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Block | None = None
    citations: list[Any] | None = None


class ImageSource(msgspec.Struct):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageInput(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    source: Block
    cache_control: Block | None = None


class ThinkingInput(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class ToolUseInput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Block | None = None


class ToolResultInput(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """Result of a call; `is_error` goes to the chat template beside the content."""

    tool_use_id: str
    content: str | list[Block] = ""
    is_error: bool | None = None
    cache_control: Block | None = None


class ToolInput(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: Block | None = None


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Thoughts; no server checks them, so they are not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens; those of the prompt that were in the prefix cache are counted apart from `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class MessageReply(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class EndDelta(msgspec.Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageReply


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: EndDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
