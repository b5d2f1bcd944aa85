"""One definition of options: what a plan says comes back from its command line, its TOML file and its manifest."""

from __future__ import annotations

import inspect
import json
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

import infer
from infer.cli import main, optimize
from infer.errors import UsageError
from infer.options import Option, checked, command_line, fields, from_values, to_toml
from infer.plan import Plan
from infer.predict.predictor import Predictor
from infer.report.rendering import formatting
from infer.serve import ray_app, server
from infer.serve.limits import ServeLimits
from infer.serve.options import ServeOptions
from infer.serve.workers.messages import ModelSource

# One value for each field of Plan that is not its default; a new field needs one too.
OTHER: dict[str, Any] = {
    "source": "my model.pt",
    "backend": "ort",
    "quant": "cluster:3",
    "layers": {"lm_head": "int8", "*.mlp.*": "float", "a=b": "nf4"},
    "bits": 4.5,
    "max_drop": 0.005,
    "calibrate": "gptq",
    "recover": "30min",
    "backend_options": {"spinning": "off"},
    "dtype": "bfloat16",
    "kv_dtype": "int8",
    "chat_template": "a b.jinja",
    "adapters": "4:32",
    "device": "cuda:1",
    "inputs": ("ids=int64[batch,seq]", "mask=bool[batch]"),
    "model": "m.py:build",
    "weights": "random",
    "key": "state_dict.ema",
    "ignore_keys": ("loss.*", "aux"),
    "data": "rows.npz",
    "golden": False,
    "task": "score",
    "load": "offload",
    "trust_code": True,
    "allow_slower": True,
    "strict_timing": True,
    "allow_partial": True,
    "max_error": 1e-5,
    "max_batch": 7,
    "max_length": 77,
    "threads": 3,
    "batches": (4, 2),
    "seed": 9,
}
PLANS = [
    Plan(source="m.pt"),
    Plan(**OTHER),
    *(Plan(**{"source": "m.pt", name: value}) for name, value in OTHER.items()),
]


def parsed_plan(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return the plan that `infer optimize` runs for these words."""
    seen: list[Plan] = []

    def stop(plan: Plan, *_: Any, **__: Any) -> None:
        seen.append(plan)
        raise UsageError("far enough")

    monkeypatch.setattr("infer.run.stages.optimize", stop)
    assert main(words) == 2
    return seen[0]


def test_the_round_trip_tests_cover_every_plan_field() -> None:
    assert list(OTHER) == [field.name for field in fields(Plan)]
    assert not [f.name for f in fields(Plan) if OTHER[f.name] == f.default]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: shlex.join(command_line(plan))[:60])
def test_the_reproduction_command_gives_an_equal_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(formatting.command(plan, "m.infer"))
    assert words[:2] == ["infer", "optimize"]
    assert parsed_plan(words[1:], monkeypatch) == plan


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: shlex.join(command_line(plan))[:60])
@pytest.mark.parametrize("every", [False, True])
def test_a_toml_plan_file_gives_an_equal_plan(plan: Plan, every: bool, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(to_toml(plan, every=every))
    given = {"trust_code": True} if plan.trust_code else {}
    assert optimize.read_plan(file, {"source": plan.source, **given}) == plan


def test_a_manifest_gives_an_equal_plan(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_bytes(msgspec.json.encode({"format": 1, "plan": PLANS[1]}))
    assert optimize.read_plan(file, {"source": "my model.pt", "trust_code": True}) == PLANS[1]


def test_the_command_line_comes_before_the_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('quant = "nf4"\nmax_batch = 8\nthreads = 2\nlayers = ["head=int8"]\nbatches = "1,4"\n')
    words = ["optimize", "m.pt", "--plan", str(file), "--quant", "int8", "--max-batch", "64"]
    plan = Plan(source="m.pt", quant="int8", threads=2, layers={"head": "int8"}, batches=(1, 4))
    assert parsed_plan(words, monkeypatch) == plan


def test_a_plan_file_cannot_set_trust_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("trust_code = true\n")
    assert not parsed_plan(["optimize", "m.pt", "--plan", str(file)], monkeypatch).trust_code
    assert parsed_plan(["optimize", "m.pt", "--plan", str(file), "--trust-code"], monkeypatch).trust_code
    assert "--trust-code" in formatting.repeat_command(PLANS[1], "m.infer")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('quantt = "int8"', "no option named 'quantt'.*Did you mean quant?"),
        ('dtype = "fp12"', "no compute dtype named 'fp12'"),
        ("dtype = 5", "no compute dtype named 5"),
        ("adapters = 5", "option adapters can't be 5"),
        ("max_batch = 0", "expected --max-batch of at least 1, got 0"),
        ('max_batch = "many"', "Expected `int`, got `str`"),
        ("max_drop = 2.0", "expected a share"),
        ("bits = 40", "expected --bits between 1 and 32"),
    ],
)
def test_a_wrong_plan_file_is_a_usage_error(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        optimize.read_plan(file, {"source": "m.pt"})
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "fp12"}, {"kv_dtype": "int3"}, {"device": "tpu"}, {"calibrate": "foo"}, {"task": "sing"},
        {"max_drop": 5.0}, {"bits": 0.0}, {"adapters": "many"}, {"max_batch": 0}, {"max_length": 0},
        {"threads": -1}, {"batches": (0,)}, {"backend": "inducter"}, {"quant": "int9"}, {"golden": "no"},
    ],
    ids=str,
)  # fmt: skip
def test_optimize_refuses_wrong_options_from_python_too(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        infer.optimize(Plan(**{"source": "absent.pt", "quant": "int8", **wrong}), tmp_path / "m.infer")


def test_checked_makes_values_canonical() -> None:
    plan = Plan(source="m.pt", dtype="bf16", kv_dtype="fp16", batches=[8, 1, 8], inputs=["x=float32[2]"])
    made = checked(plan)
    assert (made.dtype, made.kv_dtype, made.batches) == ("bfloat16", "float16", (8, 1))
    assert made.inputs == ("x=float32[2]",)
    assert checked(made) == made


def test_save_plan_writes_what_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.toml"
    words = ["optimize", "m.pt", "--adapters", "4", "--layer", 'weird "name"=int8']
    made = parsed_plan([*words, "--save-plan", str(file)], monkeypatch)
    assert tomllib.loads(file.read_text())["adapters"] == "4"
    assert parsed_plan(["optimize", "m.pt", "--plan", str(file)], monkeypatch) == made


# --- serve
SERVE: dict[str, Any] = {
    "artifacts": ("a b.infer", "c.infer"),
    "host": "0.0.0.0",  # noqa: S104
    "port": 0,
    "grpc_port": 9001,
    "ssl_certfile": "cert.pem",
    "ssl_keyfile": "key.pem",
    "ssl_keyfile_password": "word word",
    "api_key": ("one", "two"),
    "api_key_file": "keys",
    "anonymous": True,
    "allow_hosts": ("a.example", "*"),
    "device": "cuda:1",
    "threads": 3,
    "replicas": 2,
    "in_process": True,
    "memory": 1 << 33,
    "allow_reload": True,
    "trust_code": True,
    "quant": "nf4",
    "backend": "eager",
    "dtype": "float32",
    "data": "rows.npz",
    "max_length": 64,
    "max_delay_ms": 2.5,
    "drain": 0.0,
    "limits": ServeLimits(
        max_batch=7, header_seconds=2.5, grace_seconds=1e-5, nonfinite_error=True, max_body_bytes=1 << 20
    ),
    "nonfinite": "error",
    "kv_memory": 1 << 31,
    "max_tokens_per_step": 64,
    "speculation": False,
    "draft": "small.infer",
    "batch_invariant": True,
    "share_prefix_cache": True,
    "tool_form": "mistral",
    "reasoning_form": "think",
    "lora": {"style": "adapters/my style", "other": "x=y"},
    "log_requests": False,
    "log_bodies": True,
    "otel": True,
    "timings": True,
    "ray": True,
    "ray_address": "auto",
    "ray_config": "serve.yaml",
    "max_replicas": 9,
    "target_requests": 5.5,
    "num_cpus": 2.0,
    "num_gpus": 0.5,
}
SERVED = [
    ServeOptions(artifacts=("m.infer",)),
    ServeOptions(**SERVE),
    *(ServeOptions(**{"artifacts": ("m.infer",), name: value}) for name, value in SERVE.items()),
]


def served(words: list[str], monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    """Return the options that `infer serve` starts a server with, on Ray or here."""
    seen: list[ServeOptions] = []
    for name in ("infer.serve.server.start", "infer.serve.ray_run.start"):
        monkeypatch.setattr(name, lambda options: seen.append(options) or 0)
    assert main(words) == 0
    return seen[0]


def named(options: ServeOptions) -> str:
    return shlex.join(command_line(options, secrets=True))[:60]


def test_the_round_trip_tests_cover_every_serve_option() -> None:
    assert list(SERVE) == [field.name for field in fields(ServeOptions)]
    assert not [f.name for f in fields(ServeOptions) if SERVE[f.name] == f.default]


@pytest.mark.parametrize("options", SERVED, ids=named)
def test_the_serve_command_line_gives_equal_options(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(["serve", *command_line(options, secrets=True)], monkeypatch) == options


def test_a_printed_command_line_holds_no_secret() -> None:
    words = command_line(SERVED[1])
    assert not {"one", "two", "word word"} & set(words)
    assert "one" not in to_toml(SERVED[1])


@pytest.mark.parametrize("options", SERVED, ids=named)
def test_workers_receive_every_keyword_of_predictor_load(options: ServeOptions) -> None:
    source = ModelSource(path="m.infer", options=options.load_options)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=ModelSource)
    assert told == source
    inspect.signature(Predictor.load).bind("m.infer", **told.options)


def test_every_keyword_of_predictor_load_is_a_serve_option() -> None:
    keywords = {name for name in inspect.signature(Predictor.load).parameters if name not in ("cls", "path")}
    assert SERVED[1].load_options.keys() == keywords


@pytest.mark.parametrize("options", SERVED, ids=named)
def test_ray_replicas_receive_all_options_but_those_of_the_cluster(options: ServeOptions) -> None:
    args = json.loads(json.dumps(ray_app.replica_args(options)))
    told = ray_app.from_args(args)
    for field in fields(ServeOptions):
        kept = field.name not in (*ray_app.LOCAL, *ray_app.CLUSTER)
        assert getattr(told, field.name) == (getattr(options, field.name) if kept else field.default)


def test_ray_files_of_earlier_versions_are_read() -> None:
    args = {"artifacts": ["a"], "api_key": "k", "kv_memory": "16MiB", "threads": None, "limits": {}}
    told = ray_app.from_args({**args, "observing": {"requests": False, "bodies": False, "traces": True}})
    assert told == ServeOptions(
        artifacts=("a",), api_key=("k",), kv_memory=16 << 20, log_requests=False, otel=True
    )


def test_a_limit_is_not_overridden_by_an_absent_option(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["serve", "m.infer", "--limit", "drain_seconds=5", "--limit", "max_delay_us=700"]
    bounds = served(words, monkeypatch).bounds
    assert (bounds.drain_seconds, bounds.max_delay_us, bounds.nonfinite_error) == (5, 700, False)
    bounds = served(
        [*words, "--drain", "7", "--max-delay-ms", "0.3", "--nonfinite", "error"], monkeypatch
    ).bounds
    assert (bounds.drain_seconds, bounds.max_delay_us, bounds.nonfinite_error) == (7, 300, True)


@pytest.mark.parametrize(
    "wrong", [{"prot": 1}, {"port": "many"}, {"limits": {"max_bodi": 1}}, {"replicas": 0}]
)
def test_run_refuses_wrong_options_before_it_serves(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        server.run(["m.infer"], **wrong)


# --- definitions
def test_a_field_without_a_help_text_is_refused() -> None:
    class Bare(msgspec.Struct):
        one: Annotated[int, Option("number of things")] = 1
        two: int = 2

    class Empty(msgspec.Struct):
        one: Annotated[int, Option(" ")] = 1

    for kind, name in ((Bare, "two"), (Empty, "one")):
        with pytest.raises(TypeError, match=f"{kind.__name__}.{name} has no Option"):
            fields(kind)


def test_values_are_checked_against_their_bounds() -> None:
    class Bounded(msgspec.Struct):
        one: Annotated[int, Option("number", minimum=1, maximum=3)] = 1

    assert from_values(Bounded, {"one": 3}).one == 3
    with pytest.raises(UsageError, match="expected --one between 1 and 3, got 4"):
        from_values(Bounded, {"one": 4})
