"""JSON schemas of /v1/responses: the request and its items, the response and its items, the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...generation.request_fields import option
from ..openai.openai_logprobs import ContentLogprob

MAX_ITEMS = 4096  # of one conversation
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FailureCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
Item = dict[str, Any]


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Form of the text. `format`: type text, json_object, or json_schema with a schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """Effort of thoughts, which goes to the chat template; no summaries are made."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/responses; null equals absent. A field that is not here, and asks for something, is refused.

    `input`: a text, or items of type message, function_call, function_call_output, reasoning and item_reference.
    `store`: keep the response for GET, `previous_response_id` and references, by default where the server keeps any.
    """

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int | None, option("max_output_tokens")] = None
    temperature: Annotated[float | None, option("temperature")] = None
    top_p: Annotated[float | None, option("top_p")] = None
    top_logprobs: Annotated[int | None, option("top_logprobs")] = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[Item], Meta(max_length=128)] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int | None, option("priority")] = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class InputPart(msgspec.Struct, kw_only=True):
    """Part of a message: text, or an image as a data URL, whose `detail` is accepted and ignored."""

    type: Literal["input_text", "output_text", "refusal", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Item | None = None


class InputMessage(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Item]
    id: str | None = None
    status: ItemStatus | None = None
    phase: str | None = None


class CallItem(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class CallOutputItem(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="function_call_output"
):
    call_id: str
    output: str | list[Item]
    id: str | None = None
    name: str | None = None
    status: ItemStatus | None = None


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier response; a summary stands for a content that is not there."""

    id: str | None = None
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    status: ItemStatus | None = None


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    """An item of a response that is kept."""

    id: str


class FunctionTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText] = []
    content: list[ReasoningText]


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: FailureCode
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response; what the request asked for stands beside what came of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | Item
    tools: list[Item]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, str]


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """Event of a stream; they are numbered from 0."""

    sequence_number: int = 0


class Created(Event, kw_only=True, tag="response.created"):
    response: ResponseObject


class InProgress(Event, kw_only=True, tag="response.in_progress"):
    response: ResponseObject


class Completed(Event, kw_only=True, tag="response.completed"):
    response: ResponseObject


class Incomplete(Event, kw_only=True, tag="response.incomplete"):
    response: ResponseObject


class Failed(Event, kw_only=True, tag="response.failed"):
    response: ResponseObject


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputMessage | OutputCall | OutputReasoning


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputMessage | OutputCall | OutputReasoning


class PartAdded(Event, kw_only=True, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(Event, kw_only=True, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(Event, kw_only=True, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ContentLogprob] = []


class TextDone(Event, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ContentLogprob] = []


class ReasoningDelta(Event, kw_only=True, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(Event, kw_only=True, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(Event, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    arguments: str


ResponseEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
)


class Deleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Query of the items of a response: `limit` of them `after` an id, the latest first unless `order` is asc."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ResponseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Query of a response: it is never streamed again, and holds all that may be included."""

    stream: Literal["false"] = "false"


class ItemList(msgspec.Struct):
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"
