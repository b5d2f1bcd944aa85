"""`infer inspect`, `verify`, `doctor` and `report`: what is in a file, an artifact, this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..paths import writing
from .options import Artifact, AsJson, Trust


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="an artifact, a model file or a name on the Hub; nothing in it is executed"
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Describe a model file or an artifact from its headers alone."""
    from ..report import inspection
    from . import output

    output.print_facts(inspection.inspect(path), as_json=as_json)


def verify(artifact: Artifact, trust_code: Trust = False, as_json: AsJson = False) -> None:
    """Check an artifact: every hash, the signature, and a run of its golden inputs."""
    from ..predict import isolated_open
    from ..report import inspection
    from . import output

    isolated_open.open_in_subprocess(artifact, trust_code=trust_code)
    output.print_facts(inspection.verify(artifact, trust_code=trust_code), as_json=as_json)


def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can run, what it can't and why, and versions that clash."""
    from ..report import inspection
    from . import output

    output.print_doctor(inspection.doctor(), as_json=as_json)


def report(
    artifact: Artifact,
    html: Annotated[Path | None, typer.Option(help="also write the report as an HTML page here")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the full report of an artifact.

    It is as wide as the terminal; into a pipe or a file it has 100 columns, or as many as COLUMNS says.
    """
    from ..report import inspection
    from ..report.rendering.html import render_html
    from . import output

    document = inspection.report(artifact)
    if html:
        with writing(html):
            html.write_text(render_html(document))
    output.print_report(document, as_json=as_json, path=artifact)
