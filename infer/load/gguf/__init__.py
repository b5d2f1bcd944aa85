"""GGUF files, the format of llama.cpp: settings, tensors and tokenizer of a language model in one file."""

from __future__ import annotations

from .open_gguf import GgufSource, describe_gguf, open_gguf

__all__ = ["GgufSource", "describe_gguf", "open_gguf"]
