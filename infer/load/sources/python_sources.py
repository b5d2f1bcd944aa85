"""Modules built by the user's own function, and with `--trust-code` pickled ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import SourceError, UsageError
from ...plan import Plan
from ...spec import Finding
from ..loaded_model import LoadedModel
from ..module_copies import copy_structure
from .user_module import UserModule, user_code_errors


def load_user_module(user_module: UserModule) -> LoadedModel:
    """Load `file.py:factory` as the source; the module brings its own weights."""

    def build() -> nn.Module:
        with user_code_errors(user_module.text):
            module = user_module.build()
        if not isinstance(module, nn.Module):
            raise SourceError(
                f"expected {user_module.text} to return an nn.Module, got {type(module).__name__}",
                where="--model",
            )
        return module.eval()

    return module_in_memory("module", build(), build, user_module)


def load_pickled(plan: Plan, user_module: UserModule | None) -> LoadedModel:
    """Load a pickled nn.Module; called under `plan.trust_code` only."""
    try:
        pickled = torch.load(plan.source, map_location="cpu", weights_only=False)
    except (AttributeError, ModuleNotFoundError) as error:
        raise SourceError(
            f"the pickled model names code that is not here: {error}",
            where=plan.source,
            hint="Run where it can be imported, or save model.state_dict() and give --model file.py:factory",
        ) from error
    pickled, note = _module_in(pickled, plan)
    module = pickled.float().eval()
    untouched = copy_structure(module)
    loaded = module_in_memory("module", module, lambda: copy_structure(untouched), user_module)
    return loaded.saying(Finding("load", "checkpoint", note)) if note else loaded


def _module_in(pickled: Any, plan: Plan) -> tuple[nn.Module, str]:
    """Return the pickled module, which may be one value of a mapping, and a note of the other values."""
    if isinstance(pickled, nn.Module):
        if plan.key:
            raise UsageError("the file is one module: it has no names", where="--key", hint="Leave out --key")
        return pickled, ""
    values = pickled if isinstance(pickled, Mapping) else {}
    modules = [str(name) for name, value in values.items() if isinstance(value, nn.Module)]
    if plan.key and plan.key not in modules:
        raise UsageError(
            f"the file has no module {plan.key!r}",
            where="--key",
            hint=f"Modules: {', '.join(modules) or 'none'}",
        )
    if plan.key or len(modules) == 1:
        name = plan.key or modules[0]
        others = ", ".join(str(other) for other in list(values)[:7] if other != name)
        return values[name], f"took {name!r}" + (f", left {others}" if others else "")
    if modules:
        raise SourceError(
            f"expected one pickled nn.Module, got {len(modules)}: {', '.join(modules)}",
            where=plan.source,
            hint=f"Name the one to take: --key {modules[0]}",
        )
    held = f"a mapping of {', '.join(map(str, list(values)[:6]))}" if values else type(pickled).__name__
    raise SourceError(
        f"expected a pickled nn.Module, got {held}",
        where=plan.source,
        hint="Save the state dict in it on its own and give --model file.py:factory",
    )


def module_in_memory(
    kind: str, module: nn.Module, rebuild: Callable[[], nn.Module], user_module: UserModule | None
) -> LoadedModel:
    """Describe a module that holds its own weights; inputs, outputs and task are those of the user's file, if any."""
    return LoadedModel(
        rebuild=rebuild,
        kind=kind,
        module=module,
        checkpoint=None,
        inputs=user_module.inputs if user_module else (),
        outputs=user_module.outputs if user_module else (),
        task=user_module.task if user_module else "tensors",
    )
