"""One training step of a LoRA over a Llama shape, ours and the rival's, each in a process of its own."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

LENGTH, RANK = 512, 16
SEED = 5


class OurStep:
    """A model opened, packed and given adapters by `infer`; `options` name the techniques that are on."""

    def __init__(self, folder: str, threads: int, **options: Any) -> None:
        import torch

        torch.set_num_threads(threads)
        from infer.device import memory

        self.memory, self.options = memory, options
        self.model, language_model = _our_model(folder, options)
        from infer.tune.data.rows import TensorRows
        from infer.tune.memory.frozen_layers import pass_gradients
        from infer.tune.objectives.language import NextTokenObjective
        from infer.tune.settings import TrainSettings

        pass_gradients(language_model, options.get("forward", "inference"))
        self.objective = NextTokenObjective(self.model, language_model)
        if options.get("whole_logits"):
            self.objective.head = None
        rows = options.get("rows", 1)
        self.rows = TensorRows(batch(rows, language_model.config.vocab_size))  # type: ignore[union-attr]
        self.settings = TrainSettings(
            batch=rows,
            optimizer=options.get("optimizer", "adamw"),
            precision=options.get("precision", "float32"),
            activation_checkpointing=options.get("checkpointing", False),
        )
        from infer.tune.optimizers import build_optimizers

        self.optimizers, refused = build_optimizers(self.model, self.settings)
        if refused:
            raise RuntimeError(refused[0].why)
        self.opened = memory.peak_rss()

    def plan(self) -> int:
        """Return the planned peak in bytes."""
        from infer.tune.memory.memory_plan import plan_memory

        return plan_memory(self.objective, self.rows, self.settings).total

    def step(self) -> dict[str, float]:
        """Run one step; return its CPU seconds, its loss, and the peak of it and of the whole process in bytes."""
        import torch

        from infer.tune.memory.activation_checkpointing import checkpointing

        self.memory.reset_peak()
        began = time.process_time()
        dtype = getattr(torch, self.settings.precision)
        with checkpointing(self.objective.model, on=self.settings.activation_checkpointing):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss, count = self.objective.loss(self.rows.batch(range(self.settings.batch)))
            loss.backward()
        return finish(self, self.optimizers, float(loss.detach()) / int(count), began)


class RivalStep:
    """One step by transformers, peft and bitsandbytes' nf4 with double quantization, checkpointing on."""

    def __init__(self, folder: str, threads: int, packages: str) -> None:
        sys.path.insert(0, packages)
        import torch

        torch.set_num_threads(threads)
        warnings.simplefilter("ignore")
        import peft
        import transformers

        from infer.device import memory

        self.memory = memory
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
        )
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
        lora = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type=peft.TaskType.CAUSAL_LM
        )
        self.model = peft.get_peft_model(model, lora)
        self.given = batch(1, model.config.vocab_size)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizers = [torch.optim.AdamW(trained, lr=2e-4)]
        self.opened = memory.peak_rss()

    def step(self) -> dict[str, float]:
        import torch

        self.memory.reset_peak()
        began = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(
                input_ids=self.given["input_ids"], labels=self.given["input_ids"], use_cache=False
            )
        out.loss.backward()
        return finish(self, self.optimizers, float(out.loss.detach()), began)


def finish(side: Any, optimizers: list[Any], loss: float, began: float) -> dict[str, float]:
    """Step the optimizers and return what the step took."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    seconds, peak = time.process_time() - began, side.memory.peak_rss()
    side.opened = max(side.opened, peak)
    return {"seconds": seconds, "loss": loss, "peak": peak, "process peak": side.opened}


def batch(rows: int, vocab: int) -> dict[str, Any]:
    """Return seeded tokens with the token that follows each as its label, int64 [rows, LENGTH]."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, vocab, (rows, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(rows, LENGTH).contiguous()
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "position_ids": positions,
        "labels": ids[:, 1:].contiguous(),
    }


def _our_model(folder: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Open the checkpoint in the base format and add adapters, or make every weight trainable."""
    from infer import compress, load
    from infer.plan import Plan
    from infer.tune.adapter import add_adapter
    from infer.tune.settings import AdapterSettings

    base = options.get("base", "nf4")
    plan = Plan(source=folder, quant=base, data="random")
    loaded = load.load(plan)
    if base != "none":
        compress.quantize_model(loaded.module, plan, checkpoint=loaded.checkpoint, renames=loaded.renames)
    load.fill(loaded)
    model = loaded.module.model  # type: ignore[union-attr]
    model.keeps_open = [loaded]  # its mapped weights
    if options.get("full"):
        return model.requires_grad_(True).float(), model
    model.requires_grad_(False)
    with contextlib.redirect_stdout(sys.stderr):
        return add_adapter(model, AdapterSettings(source=folder, data="", lora=RANK)), model


def packages_of(folder: Path) -> str | None:
    """Say why the rival can't run from a folder of packages; None where it can."""
    return None if (folder / "bitsandbytes").is_dir() else f"no bitsandbytes in {folder}"
