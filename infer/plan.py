"""The plan: the one definition of every option of `optimize`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .options import Option, values

MODEL, TARGET, QUANT, LLM, CHECKS = "Source", "Target", "Quantization", "Language models", "Data and checks"
GROUPS = (QUANT, TARGET, CHECKS, MODEL, LLM)  # the order of the panels of --help


# Options of commands that optimize a source themselves before they serve it; all others go through `infer optimize`.
SERVED = ("quant", "backend", "dtype", "data", "max_length")
# Values of --data that name no file: numbers alone, inputs made for the model, and an error where the source has none.
RANDOM, OURS, REQUIRED = "random", "ours", "required"
INVENTED = (RANDOM, OURS)  # say nothing about the user's data
IN_MEMORY = "memory:"  # begins the `source` of a module in the user's program, before the name of its class


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Every option of one `optimize`; a frozen struct.

    "auto" is resolved once, into a new plan plus a `Choice` that says why. The manifest of an artifact keeps the
    resolved plan, so that any artifact can be made again.
    """

    source: Annotated[
        str,
        Option(
            "model to optimize: .pt, .pt2, .safetensors, .onnx, .gguf, a Hugging Face folder; a name on the Hub, "
            "ORG/NAME[@REVISION] or hf:ORG/NAME/FILE; or timm:NAME or torchvision:NAME with --weights",
            flag="",
            metavar="SOURCE",
        ),
    ]
    backend: Annotated[
        str,
        Option("backend: auto (the fastest), eager, inductor, openvino, ort, trt[:rtx|:sm_89]", group=TARGET),
    ] = "auto"
    quant: Annotated[
        str,
        Option(
            "format of the weights: none (as the source has them: codes of a quantized one are kept), float (its codes "
            "decoded), fp16, int8[:weight|:static], nf4[:16], int4[:16], fp4[:16], fp8, cluster[:2|:3|:4|:6], keep",
            group=QUANT,
        ),
    ] = "none"
    layers: Annotated[
        dict[str, str],
        Option(
            "pin the format of one layer, or of all that a glob matches (FORMAT as for --quant, or float); repeatable",
            group=QUANT,
            flag="--layer",
            metavar="NAME=FORMAT",
            repeat=True,
            parse=values.parse_layers,
        ),
    ] = {}
    bits: Annotated[
        float | None,
        Option(
            "mixed precision within a size: mean bits per weight of the layers that a format can take, tables and "
            "scales included. Each layer gets a format from --quant up, by its measured effect on the output",
            group=QUANT,
            minimum=1,
            maximum=32,
        ),
    ] = None
    max_drop: Annotated[
        float | None,
        Option(
            "mixed precision within a loss: the smallest model that loses at most this share (0.5% or 0.005) on "
            "held-out inputs, without labels. The loss is the relative increase of perplexity of a language model, the "
            "share of rows whose best class changed of a classifier, the relative error of the outputs of any other",
            group=QUANT,
            metavar="SHARE",
            parse=values.parse_share,
        ),
    ] = None
    calibrate: Annotated[
        str,
        Option(
            "how real inputs are used to quantize: none, diagonal (weigh columns by their mean square), gptq (error "
            "feedback), guided (error feedback weighed by gradients of the outputs: most faithful, slowest), auto "
            "(guided where there are rows to spare)",
            group=QUANT,
            parse=values.parse_calibration,
        ),
    ] = "auto"
    recover: Annotated[
        str,
        Option(
            "after quantizing, train the quantized model on the outputs of the float one, without labels, for so long "
            "(30min) or on so many tokens, or rows of other models: scales, tables, norms and biases, and codes too "
            "where the time allows it, layer by layer where the memory has no room for the training states of all; "
            "formats and sizes stay. The rows that judge are not trained on. Repeated whenever layers get a larger "
            "format to pass the fidelity gate",
            group=QUANT,
            metavar="TIME|TOKENS",
            parse=values.check_recovery,
        ),
    ] = ""
    backend_options: Annotated[
        dict[str, str],
        Option(
            "option of the backend that --backend names, as its file declares them; repeatable",
            group=TARGET,
            flag="--backend-option",
            metavar="NAME=VALUE",
            repeat=True,
            parse=values.parse_backend_options,
        ),
    ] = {}
    dtype: Annotated[
        str,
        Option(
            "compute dtype: auto, fp32, fp16, bf16, tf32. On a CPU auto is fp32; with --backend auto and --quant none "
            "also bf16, where the CPU has units for it and it is 1.2 times faster",
            group=TARGET,
            parse=values.parse_dtype,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        Option("KV cache dtype: auto, fp32, fp16, bf16, int8, fp8", group=LLM, parse=values.parse_kv_dtype),
    ] = "auto"
    chat_template: Annotated[
        str | None, Option("chat template (Jinja file) instead of the model's own", group=LLM, path=True)
    ] = None
    adapters: Annotated[
        str,
        Option(
            f"make room for so many LoRA adapters, of rank {values.RANK} or RANK",
            group=LLM,
            metavar="SLOTS[:RANK]",
            parse=values.check_adapters,
        ),
    ] = ""
    device: Annotated[
        str, Option("device to run on: auto, cpu, cuda, cuda:N", group=TARGET, parse=values.parse_device)
    ] = "auto"
    inputs: Annotated[
        tuple[str, ...],
        Option(
            "name, dtype and shape of an input, like ids=int64[batch,seq]; repeatable",
            group=MODEL,
            flag="--input",
            metavar="NAME=DTYPE[DIMS]",
            repeat=True,
            parse=values.parse_texts,
        ),
    ] = ()
    model: Annotated[
        str | None,
        Option(
            "builder of the model of a state dict: a Python function, timm:NAME or torchvision:NAME",
            group=MODEL,
            metavar="FILE.py:FACTORY",
        ),
    ] = None
    weights: Annotated[
        str | None,
        Option(
            "checkpoint of a source timm:NAME or torchvision:NAME, or random (to measure size and speed)",
            group=MODEL,
            metavar="FILE",
        ),
    ] = None
    key: Annotated[
        str | None,
        Option(
            "part of a checkpoint to take: the name of a state dict in it (ema, G, state_dict.generator), or what its "
            "tensors' names begin with (of CLIP and SigLIP: vision_model or text_model)",
            group=MODEL,
            metavar="NAME",
        ),
    ] = None
    ignore_keys: Annotated[
        tuple[str, ...],
        Option(
            "tensors of a checkpoint to leave out, by a glob of their names (loss.*); repeatable",
            group=MODEL,
            metavar="GLOB",
            repeat=True,
            parse=values.parse_texts,
        ),
    ] = ()
    data: Annotated[
        str | None,
        Option(
            "real inputs to calibrate and judge with: .npz, .npy, .pt, text, a folder, FILE.py:FUNCTION, or random; "
            "without it the source's own, else inputs of ours; required: an error in their place",
            group=CHECKS,
        ),
    ] = None
    golden: Annotated[
        bool,
        Option(
            "store no row of --data in the artifact: its self-test uses synthetic inputs instead of two real rows",
            group=CHECKS,
            flag="--no-golden",
            negative=True,
            one_way=True,
        ),
    ] = True
    task: Annotated[
        str,
        Option(
            "use of a language model: auto (generate where it can, else score), generate (refuse a model that "
            "can't), score (whole sequences only); of any folder of transformers: features (hidden states, without "
            "the head)",
            group=LLM,
        ),
    ] = "auto"
    load: Annotated[
        str,
        Option(
            "weight loading: auto (by memory), meta (mapped from the file), offload (read at each call)",
            group=MODEL,
        ),
    ] = "auto"
    trust_code: Annotated[
        bool, Option("open files that hold code, which then runs here", group=MODEL, one_way=True)
    ] = False
    allow_slower: Annotated[
        bool,
        Option(
            "keep a result that is slower than the float model, or no gain over the source",
            group=CHECKS,
        ),
    ] = False
    strict_timing: Annotated[
        bool, Option("refuse a result that could be timed only on a busy machine", group=CHECKS)
    ] = False
    allow_partial: Annotated[
        bool, Option("keep a result with less than a tenth of its weights quantized", group=CHECKS)
    ] = False
    max_error: Annotated[
        float | None, Option("accept this relative error of outputs, and judge nothing else", group=CHECKS)
    ] = None
    max_batch: Annotated[int, Option("largest batch the artifact accepts", group=TARGET, minimum=1)] = 64
    max_length: Annotated[int, Option("longest sequence the artifact accepts", group=TARGET, minimum=1)] = 512
    threads: Annotated[int | None, Option("CPU threads; default: all", group=TARGET, minimum=1)] = None
    batches: Annotated[
        tuple[int, ...],
        Option(
            "batch sizes to time and to judge",
            group=CHECKS,
            flag="--batch",
            metavar="SIZES",
            parse=values.parse_batches,
            format=values.format_batches,
        ),
    ] = (1, 8)
    seed: Annotated[int, Option("seed of the rows drawn from --data", group=CHECKS)] = 0

    @property
    def changes_numbers(self) -> bool:
        """True where a format or a coarser dtype rounds what the model computes with."""
        return self.quant != "none" or self.dtype != "float32"

    @property
    def quant_name(self) -> str:
        """Name of the format without its option: `cluster:3` → `cluster`."""
        return self.quant.partition(":")[0]

    @property
    def quant_option(self) -> str:
        """Option of the format: `cluster:3` → `3`; empty when none was given."""
        return self.quant.partition(":")[2]

    def with_(self, **changes: Any) -> Plan:
        """Return a copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)
