"""An artifact as a model of transformers, made and opened by Optimum's rules: tensors in, a `ModelOutput` out."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from optimum.modeling_base import OptimizedModel
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from .. import hub
from ..artifact import store
from ..artifact.artifact_cache import cached_artifact, digest_of_files
from ..artifact.manifest import BESIDE, MANIFEST
from ..errors import InputError, UsageError, unknown
from ..load.carried_files import CARRIED
from ..plan import Plan
from ..predict.predictor import Predictor
from ..run.stages import optimize

PLAN_FIELDS = tuple(name for name in Plan.__struct_fields__ if name != "source")
OPENING = ("device", "threads", "trust_code")  # options of `from_pretrained` for an artifact
MODALITIES = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
# Of these an input that a model does not take says nothing where all of its values are this one.
NEUTRAL = {"attention_mask": 1, "token_type_ids": 0}


class ArtifactConfig(PretrainedConfig):
    """Stands for any artifact's configuration where transformers lists the models that its pipelines know."""


class InferModel(OptimizedModel):
    """An opened artifact, `predictor`, called as a model of transformers is; it computes no gradients.

    Tensors go in and out on the CPU; the artifact runs on the device that it was opened for.
    """

    config_class = ArtifactConfig
    base_model_prefix = "infer_model"
    auto_model_class: ClassVar[Any]
    output_class: ClassVar[type[ModelOutput]]
    task: ClassVar[str]
    asked: ClassVar[Mapping[str, Any]] = {}  # fields of the plan of `export=True`
    predictor: Predictor

    def __init__(self, predictor: Predictor, config: PretrainedConfig) -> None:
        super().__init__(predictor, config)
        if predictor.task != self.task:
            raise UsageError(
                f"{predictor.name} is a {predictor.task} model; {type(self).__name__} opens those of {self.task}",
                where=str(predictor.path),
            )
        self.predictor = predictor
        self.main_input_name = predictor.inputs[0].name
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.name_or_path = str(predictor.path)
        self.input_modalities = (MODALITIES.get(self.main_input_name, "text"),)

    def __init_subclass__(cls, **options: Any) -> None:
        """List the class among those that transformers' pipelines know for its task."""
        super().__init_subclass__(**options)
        if "auto_model_class" in vars(cls):
            cls.auto_model_class.register(ArtifactConfig, cls, exist_ok=True)

    def can_generate(self) -> bool:
        return False

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Return the model itself: where and in which precision an artifact runs is chosen before."""
        kind = self.predictor.manifest.device.partition(":")[0]
        if isinstance(device, torch.dtype) or dtype is not None:
            raise UsageError("the precision of an artifact is fixed", hint="Make it with dtype=…, or quant=…")
        if device is not None and torch.device(device).type != kind:
            warnings.warn(f"{self.predictor.name} stays on {kind}, for which it was made", stacklevel=2)
        return self

    def eval(self) -> Self:
        return self

    def forward(self, *values: Any, return_dict: bool | None = None, **tensors: Any) -> Any:
        """Run the artifact on tensors by name; those without one are its inputs in their order.

        Returns the `ModelOutput` of the task, with `return_dict=False` a tuple. Raises `InputError` for a tensor that
        the artifact does not take, unless it changes nothing.
        """
        names = [spec.name for spec in self.predictor.inputs]
        if len(values) > len(names):
            raise InputError(f"expected at most {len(names)} tensors, {', '.join(names)}, got {len(values)}")
        tensors |= dict(zip(names, values, strict=False))
        found = self.output_class(**self.predictor.predict(self._inputs(tensors)))
        return found.to_tuple() if return_dict is False else found

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the artifact's inputs out of those `given`, with their dtypes, and what says nothing where absent."""
        named = {name: value for name, value in given.items() if value is not None}
        main = named.get(self.main_input_name)
        found = {}
        for spec in self.predictor.inputs:
            value = named.pop(spec.name, None)
            if value is None and spec.name in NEUTRAL and main is not None:
                value = torch.full(main.shape[: len(spec.shape)], NEUTRAL[spec.name])
            if value is not None:
                value = torch.as_tensor(value).cpu()
                same_kind = value.is_floating_point() == spec.torch_dtype.is_floating_point
                found[spec.name] = value.to(spec.torch_dtype) if same_kind else value
        self._refuse(named)
        return found

    def _refuse(self, named: Mapping[str, Any]) -> None:
        """Raise `InputError` for the first argument that the artifact has no use for, unless it changes nothing."""
        for name, value in named.items():
            tensor = isinstance(value, Tensor | np.ndarray)
            if tensor and name in NEUTRAL and bool((value == NEUTRAL[name]).all()):
                continue
            if tensor or value:
                takes = ", ".join(str(spec) for spec in self.predictor.inputs)
                raise InputError(
                    f"{self.predictor.name} has no use for {name!r}; it takes {takes}", where=name
                )

    @classmethod
    def _from_pretrained(
        cls, model_id: str | Path, config: PretrainedConfig, trust_remote_code: bool = False, **options: Any
    ) -> Self:
        """Open an artifact: its folder, one that `save_pretrained` wrote, or a repository of such."""
        source = _fetched(model_id, options)
        for name in options:
            if name not in OPENING:
                hint = "With export=True a source folder is optimized, and the fields of Plan are options"
                raise UsageError(
                    f"no option of an artifact is named {name!r}", where=str(model_id), hint=hint
                )
        place = _artifact_in(source.path)
        if place is None:
            raise UsageError(
                "not an artifact of infer",
                where=str(source.path),
                hint=f"{cls.__name__}.from_pretrained({str(model_id)!r}, export=True) optimizes it",
            )
        if source.is_artifact:
            place = _plain_copy(place, str(model_id))
        options["trust_code"] = options.get("trust_code", False) or trust_remote_code
        return cls(Predictor.load(place, **options), config)

    @classmethod
    def _export(
        cls, model_id: str | Path, config: PretrainedConfig, trust_remote_code: bool = False, **options: Any
    ) -> Self:
        """Optimize a folder of transformers into the user's cache, and open the artifact; it is found there again."""
        source = _fetched(model_id, options).path
        if _artifact_in(source) is not None:
            raise UsageError("this is an artifact already", where=str(source), hint="Leave out export=True")
        for name in options:
            if name not in PLAN_FIELDS:
                raise unknown("option", name, PLAN_FIELDS)
        options["trust_code"] = options.get("trust_code", False) or trust_remote_code
        plan = Plan(source=str(source), **{**cls.asked, **options})
        named = source.resolve() if os.path.isdir(model_id) else Path(model_id)
        place = cached_artifact(plan, digest_of_files(source), named.name, lambda to: optimize(plan, to))
        return cls(Predictor.load(place), config)

    def _save_pretrained(self, save_directory: str | Path) -> None:
        """Copy the artifact into the folder, and what tokenizers and processors are read from beside it."""
        folder, place = Path(save_directory), self.predictor.path
        shutil.copytree(place, folder / BESIDE)
        for name in CARRIED:
            if name != self.config_name and (place / name).is_file():
                shutil.copyfile(place / name, folder / name)

    def push_to_hub(
        self,
        save_directory: str,
        repository_id: str,
        private: bool | None = None,
        token: bool | str | None = None,
    ) -> str:
        """Upload a folder that `save_pretrained` wrote, with its folders; returns the address of the commit."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id=repository_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository_id, folder_path=save_directory))


def _artifact_in(folder: Path) -> Path | None:
    """Return the artifact of a folder: itself or the one that `save_pretrained` put there; None without one."""
    return next((place for place in (folder, folder / BESIDE) if (place / MANIFEST).is_file()), None)


def _plain_copy(place: Path, name: str) -> Path:
    """Copy an artifact, as huggingface_hub has it a folder of links, into the user's cache; once."""
    return cached_artifact(
        Plan(source=name), digest_of_files(place), Path(name).name, lambda to: store.copy(place, to)
    )


def _fetched(model_id: str | Path, options: dict[str, Any]) -> hub.Fetched:
    """Take the options about the Hub out of `options`; return the local folder, of a repository what a source needs."""
    given = {field.name: options.pop(field.name, None) for field in fields(hub.Access)}
    revision, subfolder = options.pop("revision", None), options.pop("subfolder", "")
    if os.path.isdir(model_id):
        return hub.Fetched(Path(model_id, subfolder))
    access = hub.Access(**{name: value for name, value in given.items() if value is not None})
    return hub.fetch(hub.HubName(str(model_id), revision, inner=subfolder), access=access)
