"""What is asked of one `optimize`, and the workload that language models are timed for."""

from __future__ import annotations

from typing import Any

import msgspec

# auto: generate where the model can, else score whole windows; generate: refuse a model that can't.
TASKS = ("auto", "generate", "score")
# none: where a format needs it only; diagonal: columns weigh by their mean square; gptq: error feedback.
CALIBRATIONS = ("auto", "none", "diagonal", "gptq")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that is asked of one `optimize`; "auto" is resolved once, into a new plan plus a `Choice`."""

    source: str
    backend: str = "auto"
    quant: str = "none"
    layers: dict[
        str, str
    ] = {}  # layer name or glob → format; whoever is named here is never decided otherwise
    bits: float | None = None  # mean bits per weight of the layers that a format can take
    max_drop: float | None = None  # share, 0…1: see `limits`
    calibrate: str = "auto"  # how quantizers use real inputs: `CALIBRATIONS`
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of the KV cache of a language model: `KV_DTYPES` of `infer.attention`
    chat_template: str | None = None  # a Jinja file, for a language model
    adapters: str = ""  # SLOTS or SLOTS:RANK of LoRA adapters that a language model has room for
    device: str = "auto"
    inputs: tuple[str, ...] = ()
    model: str | None = None
    data: str | None = None
    golden: bool = True  # the artifact keeps two rows of `data` for its self-test, else synthetic ones
    task: str = "auto"  # of a language model: `TASKS`
    load: str = "auto"
    trust_code: bool = False
    allow_slower: bool = False
    allow_partial: bool = False  # less than a tenth of the weights quantized is enough
    max_error: float | None = None
    max_batch: int = 64
    max_length: int = 512
    threads: int | None = None
    batches: tuple[int, ...] = (1, 8)
    seed: int = 0

    @property
    def quant_name(self) -> str:
        """`cluster:3` → `cluster`."""
        return self.quant.partition(":")[0]

    @property
    def quant_option(self) -> str:
        """`cluster:3` → `3`; empty when none was given."""
        return self.quant.partition(":")[2]

    def with_(self, **changes: Any) -> Plan:
        return msgspec.structs.replace(self, **changes)


class Workload(msgspec.Struct, frozen=True):
    """The use that a language model is timed for, at each batch size of the plan: that many prompts of `prompt` tokens,
    read `chunk` tokens in a step, each answered by `answer` tokens. Dispatch sums a layer's time over it, the speed
    gate the model's."""

    prompt: int = 256
    answer: int = 128
    chunk: int = 256

    def steps(self, batch: int) -> dict[int, int]:
        """Tokens in a step → number of such steps."""
        whole, rest = divmod(batch * self.prompt, self.chunk)
        steps = {batch: self.answer}
        for tokens, count in ((self.chunk, whole), (rest, 1)):
            if tokens and count:
                steps[tokens] = steps.get(tokens, 0) + count
        return steps

    def logits(self, batch: int) -> dict[int, int]:
        """Tokens whose logits a step computes → number of such steps: of a prompt only its last token's."""
        return {batch: self.answer + 1}

    def __str__(self) -> str:
        return f"a prompt of {self.prompt} tokens and an answer of {self.answer}"


WORKLOAD = Workload()


def saves_memory(quant: str) -> bool:
    """Weight-only formats: their point is memory, so that their layers need not be faster one by one."""
    return quant == "int8:weight" or quant.partition(":")[0] in ("nf4", "int4", "fp4", "cluster")
