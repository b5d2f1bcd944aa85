"""`infer optimize`: a plan from the command line or a file, and what is printed about the run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from ..budgets import SEARCH, Budgets
from ..errors import SourceError, UsageError
from ..options import from_values, to_toml
from ..paths import temporary_files, writing
from ..plan import GROUPS, Plan
from ..regular_files import is_there, read_regular
from ..reporter import Reporter
from .options import with_options

if TYPE_CHECKING:
    from ..report.document import Report

MAX_PLAN = 1 << 27  # bytes
OUTPUT = "Output"


@with_options(Plan, (*GROUPS, SEARCH), Budgets)
def optimize(
    plan: Plan,
    budgets: Budgets,
    given: set[str],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="artifact to write; default: NAME.infer in the current folder",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[bool, typer.Option(help="replace an existing artifact", rich_help_panel=OUTPUT)] = False,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="take all options from an artifact's manifest.json or a TOML file; options given here come first",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    save_plan: Annotated[
        Path | None,
        typer.Option(help="write the options of this run to a TOML file, for --plan", rich_help_panel=OUTPUT),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="write a profiler trace here (open it in Perfetto)", rich_help_panel=OUTPUT),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="print every finding and all tables", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="print one JSON document on stdout, nothing else", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Turn SOURCE into an artifact that is smaller, faster and checked against the original.

    With a budget or an objective it searches: backends, formats and dtypes are tried, and the best one within the
    budgets is published.
    """
    from . import output as printed

    if plan_file:
        plan = read_plan(plan_file, {name: getattr(plan, name) for name in given})
    if save_plan:
        with writing(save_plan):
            save_plan.write_text(to_toml(plan))
    target = output or default_output(plan.source)
    progress = printed.progress_reporter(quiet=as_json, verbose=verbose, search=budgets.is_given)
    with temporary_files(), progress as reporter:
        path, report = _run(plan, budgets, target, reporter, replace=force)
    printed.print_verdict(report, as_json=as_json, path=path, verbose=verbose)
    if profile:
        from .. import bench

        bench.profile(path, profile)
        Console(stderr=True).print(f"profile: {profile} (open it at ui.perfetto.dev)")


def _run(
    plan: Plan, budgets: Budgets, target: Path, reporter: Reporter, *, replace: bool
) -> tuple[Path, Report]:
    """Search if budgets or an objective are given, else run the plan unchanged."""
    if budgets.is_given:
        from ..budget_search.run_search import search

        result = search(plan, budgets, target, reporter=reporter, replace=replace)
        return result.path, result.report
    from ..run import stages

    outcome = stages.optimize(plan, target, reporter=reporter, replace=replace)
    return outcome.path, outcome.report


def default_output(source: str) -> Path:
    """Return the output in the current folder: `model.pt` → `model.infer`, `timm:resnet18` → `resnet18.infer`,
    `ORG/NAME` → `NAME.infer`.
    """
    from .. import hub
    from ..load.identification.source_names import is_library_name

    if is_library_name(source):
        return Path(f"{source.partition(':')[2]}.infer")
    if name := hub.named(source):
        return Path(f"{name.stem}.infer")
    path = Path(source.partition(":")[0].rstrip("/"))
    stem = path.name if is_there(path) and path.is_dir() else path.stem
    return Path(f"{stem or 'model'}.infer")


def read_plan(path: Path, given: dict[str, object]) -> Plan:
    """Read a plan from a manifest.json (its `plan`) or a TOML file; `given` options override those of the file.

    Raises `UsageError` for a file that can't be read, an unknown option and a wrong value. Trust is never read from a
    file: code is opened only where the command line itself has --trust-code.
    """
    try:
        text = read_regular(path, MAX_PLAN)
        data = tomllib.loads(text.decode()) if path.suffix == ".toml" else msgspec.json.decode(text)
        stored = dict(data.get("plan", data))
    except SourceError as error:
        raise UsageError(f"the plan can't be read: {error.message}", where=str(path)) from error
    except (ValueError, msgspec.MsgspecError, RecursionError, AttributeError, TypeError) as error:
        raise UsageError(f"the plan can't be read: {error}", where=str(path)) from error
    if stored.pop("trust_code", False) and "trust_code" not in given:
        stored["trust_code"] = False
    try:
        return from_values(Plan, {**stored, **given})
    except UsageError as error:
        raise UsageError(f"the plan can't be read: {error}", where=str(path)) from error
