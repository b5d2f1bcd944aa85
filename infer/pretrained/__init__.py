"""Artifacts as models of transformers, by Optimum's conventions.

`classes` has the table of the `InferModelFor…`, `model` what all of them do, `generating_model` those that write text.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..distribution import install
from ..errors import NotUsableError

for _package in ("optimum", "transformers"):
    if find_spec(_package) is None:
        raise NotUsableError(f"models of transformers need the package {_package}", hint=install("optimum"))
