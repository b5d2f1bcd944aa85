"""Public names, command line flags, manifest keys and exit codes: none changes by accident."""

from __future__ import annotations

import msgspec
import typer

import infer
from infer import errors, plugins
from infer.artifact import store
from infer.cli import application
from infer.plan import Plan

COMMANDS = [
    "optimize", "predict", "generate", "chat", "bench", "serve", "top", "inspect", "verify", "doctor", "report",
    "trials", "export", "tune", "distil", "mcp",
]  # fmt: skip


def test_public_names_are_stable() -> None:
    assert infer.__all__ == [
        "AdapterSettings", "Budgets", "DistilSettings", "Finding", "InferError", "Plan", "Predictor", "TensorSpec",
        "TrainSettings", "__version__", "compile", "distil", "optimize", "record", "replace", "restore", "search",
        "train_adapter",
    ]  # fmt: skip
    assert all(getattr(infer, name) is not None for name in infer.__all__)


OPTIMIZE_ONNX = """
import sys
import onnx
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "m.onnx")
from infer.cli import main
code = main(["optimize", "m.onnx", "--batch", "1", "--allow-slower"])
later = ("torch._inductor", "torch._dynamo", "infer.llm.engine", "infer.tune", "infer.serve", "infer.budget_search",
         "infer.load.gguf", "infer.load.heads", "infer.load.onnx_program", "infer.families.llama_like")
print(code, [name for name in later if name in sys.modules])
"""


def test_a_run_of_an_onnx_file_imports_no_compiler_nor_other_openers(run_python, tmp_path) -> None:
    here = f"import os; os.chdir({str(tmp_path)!r})"
    assert run_python(here + OPTIMIZE_ONNX).splitlines()[-1] == "0 []"


def test_importing_infer_imports_no_torch(run_python) -> None:
    assert run_python("import infer, sys; print('torch' in sys.modules)").strip() == "False"


def test_commands_are_stable() -> None:
    assert list(typer.main.get_command(application()).commands) == COMMANDS


def test_flags_of_optimize_are_stable() -> None:
    command = typer.main.get_command(application()).commands["optimize"]
    flags = sorted(flag for p in command.params for flag in p.opts if flag.startswith("--"))
    assert flags == [
        "--adapters", "--allow-partial", "--allow-slower", "--backend", "--backend-option", "--batch", "--bits",
        "--calibrate",
        "--chat-template", "--data", "--device", "--dtype", "--for", "--force", "--fresh", "--ignore-keys", "--input",
        "--json", "--keep-best", "--key", "--kv-dtype", "--layer", "--load", "--max-batch", "--max-drop", "--max-error",
        "--max-first-token", "--max-latency", "--max-length", "--max-memory", "--max-p99", "--max-size", "--metric",
        "--min-score", "--min-throughput", "--model", "--no-golden", "--output", "--plan", "--profile",
        "--quant", "--ray", "--ray-address", "--recover",
        "--save-plan", "--seed", "--sequences", "--space", "--strict-timing", "--task", "--threads", "--time",
        "--trust-code", "--verbose", "--weights",
    ]  # fmt: skip


def test_flags_of_tune_are_stable() -> None:
    command = typer.main.get_command(application()).commands["tune"]
    flags = sorted(flag for p in command.params for flag in p.opts if flag.startswith("--"))
    assert flags == [
        "--activation-checkpointing", "--base", "--batch", "--checkpoint-every", "--clip", "--data", "--epochs",
        "--force", "--fresh", "--held-out", "--json", "--learning-rate", "--length", "--lora", "--lora-alpha",
        "--lora-dropout", "--lora-layers", "--max-memory", "--measure-every", "--micro-batch", "--optimizer",
        "--output", "--packing", "--patience", "--plan-memory", "--precision", "--schedule", "--seed", "--steps",
        "--time", "--tokens", "--verbose", "--warmup", "--weight-decay",
    ]  # fmt: skip


def test_flags_of_distil_are_stable() -> None:
    command = typer.main.get_command(application()).commands["distil"]
    flags = sorted(flag for p in command.params for flag in p.opts if flag.startswith("--"))
    assert flags == [
        "--activation-checkpointing", "--batch", "--checkpoint-every", "--clip", "--data", "--epochs", "--force",
        "--fresh", "--hard", "--held-out", "--hidden", "--json", "--learning-rate", "--length", "--max-memory",
        "--measure-every", "--micro-batch", "--model", "--optimizer", "--output", "--patience", "--precision",
        "--schedule", "--seed", "--steps", "--student", "--temperature", "--time", "--tokens", "--trust-code",
        "--verbose", "--warmup", "--weight-decay",
    ]  # fmt: skip


def test_flags_of_serve_are_stable() -> None:
    command = typer.main.get_command(application()).commands["serve"]
    flags = sorted(flag for p in command.params for flag in p.opts if flag.startswith("--"))
    assert flags == [
        "--allow-host", "--allow-reload", "--anonymous", "--api-key", "--api-key-file", "--backend",
        "--batch-invariant", "--data", "--device", "--draft", "--drain", "--dtype", "--grpc-port", "--host",
        "--in-process",
        "--kv-memory", "--limit", "--log-bodies", "--log-requests", "--lora", "--max-delay-ms", "--max-length",
        "--max-replicas", "--max-tokens-per-step", "--memory", "--nonfinite", "--num-cpus", "--num-gpus",
        "--otel", "--port", "--quant", "--ray", "--ray-address", "--ray-config", "--reasoning-form", "--replicas",
        "--share-prefix-cache", "--speculation", "--ssl-certfile", "--ssl-keyfile", "--ssl-keyfile-password",
        "--target-requests", "--threads", "--timings", "--tool-form", "--trust-code",
    ]  # fmt: skip


def test_manifest_keys_are_stable() -> None:
    assert [f.name for f in msgspec.structs.fields(store.Manifest)] == [
        "format", "name", "version", "made_with", "plan", "choices", "backend", "device", "task", "inputs", "outputs",
        "sizes", "multiples", "target", "versions", "meta", "verdict", "findings", "layers",
        "samples_from", "scores_only", "joins", "states", "files", "lengths",
    ]  # fmt: skip


def test_plan_round_trips_through_json() -> None:
    plan = Plan(source="model.pt", quant="cluster:3", inputs=("x=float32[batch,8]",), max_error=0.1)
    plan = plan.with_(layers={"head": "int8", "blocks.*": "float"}, bits=4.5, max_drop=0.005)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_exit_codes_are_stable() -> None:
    codes = {c.__name__: c.exit_code for c in (errors.InferError, *_subclasses(errors.InferError))}
    assert codes["InferError"] == 1
    assert codes["UsageError"] == codes["InputError"] == 2
    assert codes["SourceError"] == codes["ArtifactError"] == codes["UnsafeSourceError"] == 3
    assert (codes["GateError"], codes["NotUsableError"], codes["BusyError"], codes["ResourceError"]) == (
        4,
        5,
        6,
        7,
    )


def _subclasses(cls: type) -> list[type]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_subclasses(sub))]


def test_backends_and_quantizers_are_stable() -> None:
    assert plugins.names("backends") == ["eager", "inductor", "openvino", "ort", "trt"]
    formats = ["cluster", "fp16", "fp4", "fp8", "int4", "int8", "keep", "nf4"]
    assert plugins.names("infer.compress.formats") == formats
