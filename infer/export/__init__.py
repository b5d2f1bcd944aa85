"""Writing a model for other engines: GGUF files, which are read back and compared, and Hugging Face folders."""

from __future__ import annotations

from .export_model import FORMS, export_model

__all__ = ["FORMS", "export_model"]
