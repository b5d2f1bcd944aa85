"""OpenAI's API for text: models, completions, chat, embeddings; and vLLM's routes for tokens beside it."""

from __future__ import annotations

from ...http.routing import Route
from ...service import Service
from . import chat, completions, embeddings, models, tokenization
from .chat_types import ChatChunk, ChatCompletion, ChatRequest
from .embeddings import Embeddings, EmbeddingsRequest, MultiVectorEmbeddings
from .models import Model, ModelList
from .openai_errors import ERROR_FORMAT
from .openai_types import Completion, CompletionRequest
from .tokenization import DetokenizeRequest, Prompt, TokenizeRequest, TokenizerInfo, Tokens


def routes(service: Service) -> list[Route]:
    return [
        Route("GET", "/v1/models", None, ModelList, models.models, "The served models", ERROR_FORMAT),
        Route(
            "GET", "/v1/models/{model}", None, Model, models.model, "One served model", ERROR_FORMAT, (404,)
        ),
        Route(
            "POST",
            "/v1/completions",
            CompletionRequest,
            Completion,
            completions.completions,
            "Text that follows a text",
            ERROR_FORMAT,
            (422, 429),
            work=True,
            chunk=Completion,
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            ChatRequest,
            ChatCompletion,
            chat.chat,
            "The next message of a conversation",
            ERROR_FORMAT,
            (422, 429),
            work=True,
            chunk=ChatChunk,
        ),
        Route(
            "POST",
            "/v1/embeddings",
            EmbeddingsRequest,
            Embeddings,
            embeddings.embeddings,
            "Embeddings of texts",
            ERROR_FORMAT,
            (429,),
            work=True,
            answers=(MultiVectorEmbeddings,),
        ),
        Route(
            "POST",
            "/tokenize",
            TokenizeRequest,
            Tokens,
            tokenization.tokenize,
            "Token ids of a text or a chat",
            ERROR_FORMAT,
            work=True,
        ),
        Route(
            "POST",
            "/detokenize",
            DetokenizeRequest,
            Prompt,
            tokenization.detokenize,
            "The text of token ids",
            ERROR_FORMAT,
            work=True,
        ),
        Route(
            "GET",
            "/tokenizer_info",
            None,
            TokenizerInfo,
            tokenization.tokenizer_info,
            "Special tokens and chat template",
            ERROR_FORMAT,
            (404,),
        ),
    ]
