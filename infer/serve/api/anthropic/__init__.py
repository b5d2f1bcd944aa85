"""Anthropic's Messages: the next message of a conversation, in full or as a stream of events, and its size."""

from __future__ import annotations

from ...http.routing import Route
from ...service import Service
from .anthropic_errors import ERROR_FORMAT
from .messages import count_tokens, create
from .messages_types import CountRequest, MessageEvent, MessageReply, MessagesRequest, TokenCount


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/messages",
            MessagesRequest,
            MessageReply,
            create,
            "The next message of a conversation, as Anthropic has it",
            ERROR_FORMAT,
            (422, 429),
            work=True,
            chunk=MessageEvent,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            CountRequest,
            TokenCount,
            count_tokens,
            "Tokens of a conversation, as Anthropic has it",
            ERROR_FORMAT,
            work=True,
        ),
    ]
