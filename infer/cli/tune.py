"""`infer tune`: a LoRA adapter trained over a frozen base, packed or in float."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..errors import UsageError
from ..tune.settings import ADAPTER, DATA, TRAINING, AdapterSettings, TrainSettings
from .options import AsJson, with_options


@with_options(AdapterSettings, (DATA, ADAPTER, TRAINING), TrainSettings)
def tune(
    settings: AdapterSettings,
    training: TrainSettings,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder of the adapter to write")
    ] = None,
    plan_memory: Annotated[
        bool,
        typer.Option("--plan-memory", help="print memory and time of each technique, and train nothing"),
    ] = False,
    force: Annotated[bool, typer.Option(help="replace an existing adapter")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="print every finding")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a LoRA adapter of SOURCE on chats or text, and write it in PEFT's format.

    The weights of SOURCE stay frozen, packed as --base says. `infer serve ARTIFACT --lora NAME=FOLDER` serves it.
    Several processes: accelerate launch -m infer tune …
    """
    from ..tune.adapter import plan_adapter, train_adapter
    from . import output as printed

    if plan_memory:
        with printed.progress_reporter(quiet=as_json, verbose=verbose) as reporter:
            rows = plan_adapter(settings, training, reporter)
        printed.print_memory_table(rows, as_json=as_json)
        return
    if output is None:
        raise UsageError("--output is missing", hint="Give the folder of the adapter to write")
    with printed.progress_reporter(quiet=as_json, verbose=verbose) as reporter:
        try:
            report = train_adapter(settings, training, output, replace=force, reporter=reporter)
        except KeyboardInterrupt as interrupt:  # typer drops what it says
            if str(interrupt):
                print(f"infer: {interrupt}", file=sys.stderr)
            raise
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    printed.print_facts({**report.facts(), "adapter": str(output)}, as_json=False)
