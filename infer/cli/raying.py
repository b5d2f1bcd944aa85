"""`infer serve --ray`: options in, one deployment out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import UsageError
from ..serve import ray_run
from ..serve.limits import ServeLimits
from ..serve.ray_app import Asked


def refuse(given: Mapping[str, object]) -> None:
    """Options that only a server without Ray has, by name; raises `UsageError` for those that were said."""
    if said := [name for name, value in given.items() if value]:
        raise UsageError(
            f"--ray has no {', '.join(said)}",
            hint="Leave them out, or serve without --ray; certificates belong to what stands before Ray's proxy",
        )


def asked(
    artifacts: Sequence[Path], *, limits: ServeLimits, max_delay_us: int, drain: float, **options: Any
) -> Asked:
    """Paths are made absolute: they are opened on other nodes."""
    limits = msgspec.structs.replace(limits, max_delay_us=max_delay_us, drain_seconds=drain)
    return Asked(artifacts=[str(path.absolute()) for path in artifacts], limits=limits, **options)


def run(
    asked: Asked, address: str | None, host: str, port: int, config: Path | None, *, anonymous: bool
) -> int:
    """Deploy it and stay until SIGTERM, or write Ray's config file for it; the exit code."""
    cluster = ray_run.Cluster(address=address, host=host, port=port)
    if config is not None:
        ray_run.write_config(config, asked, cluster)
        return 0
    return ray_run.run(asked, cluster, anonymous=anonymous)
