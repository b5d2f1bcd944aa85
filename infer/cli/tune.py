"""`infer tune`: a LoRA adapter trained over a frozen base, packed or in float."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..tune.adapters.settings import ADAPTER, DATA, AdapterSettings
from ..tune.settings import TRAINING, TrainSettings
from .options import AsJson, with_options


@with_options(AdapterSettings, (DATA, ADAPTER, TRAINING), TrainSettings)
def tune(
    settings: AdapterSettings,
    training: TrainSettings,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the adapter to write")],
    force: Annotated[bool, typer.Option(help="replace an existing adapter")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="print every finding")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a LoRA adapter of SOURCE on chats or text; its folder is of PEFT's format.

    The weights of SOURCE stay frozen, packed as --base says. `infer serve ARTIFACT --lora NAME=FOLDER` serves it.
    Several processes: accelerate launch -m infer tune …
    """
    from ..tune.adapters.train_adapter import train_adapter
    from . import output as printed

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
