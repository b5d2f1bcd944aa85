"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Artifact = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="a folder NAME.infer made by `infer optimize`")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, nothing else")]
Trust = Annotated[bool, typer.Option("--trust-code", help="open files that hold code")]
