"""Suppression of the logs and warnings of exporters and compilers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Suppress warnings and log records below `level` of exporters, compilers and bitsandbytes; exceptions pass."""
    names = ("torch", "torch.export", "torch._inductor", "torch.onnx", "bitsandbytes")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(level)
        try:
            yield
        finally:
            for logger, usual in zip(loggers, levels, strict=True):
                logger.setLevel(usual)
