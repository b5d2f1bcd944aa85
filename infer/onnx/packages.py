"""Packages that writing an ONNX file takes, and that a backend takes besides."""

from __future__ import annotations

from importlib.util import find_spec

from ..distribution import install

EXPORTER = ("onnx", "onnxscript", "onnx_ir")


def missing(extra: str, *modules: str) -> str | None:
    """Return the first of `modules` and the exporter's own that is not installed, with its command; else None.

    `extra`: of our package, which installs them all.
    """
    absent = next((module for module in (*modules, *EXPORTER) if find_spec(module) is None), None)
    return absent and f"{absent.replace('_', '-')} is not installed ({install(extra)})"
