"""Command lines of the benchmarks."""

from __future__ import annotations

import argparse


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the text of a module, its lines as they are."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
