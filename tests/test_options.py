"""One definition of options: what a plan says comes back from its command line, its TOML file and its manifest."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from infer.cli import main, optimize
from infer.errors import UsageError
from infer.options import Option, command_line, fields, from_values, to_toml
from infer.plan import Plan
from infer.report import wording

# One value for each field of Plan that is not its default; a new field needs one too.
OTHER: dict[str, Any] = {
    "source": "my model.pt",
    "backend": "ort",
    "quant": "cluster:3",
    "layers": {"lm_head": "int8", "*.mlp.*": "float", "a=b": "nf4"},
    "bits": 4.5,
    "max_drop": 0.005,
    "calibrate": "gptq",
    "dtype": "bfloat16",
    "kv_dtype": "int8",
    "chat_template": "a b.jinja",
    "adapters": "4:32",
    "device": "cuda:1",
    "inputs": ("ids=int64[batch,seq]", "mask=bool[batch]"),
    "model": "m.py:build",
    "data": "rows.npz",
    "golden": False,
    "task": "score",
    "load": "per-tensor",
    "trust_code": True,
    "allow_slower": True,
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


def asked(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan that `infer optimize` runs for these words."""
    seen: list[Plan] = []

    def stop(plan: Plan, *_: Any, **__: Any) -> None:
        seen.append(plan)
        raise UsageError("far enough")

    monkeypatch.setattr("infer.pipeline.optimize", stop)
    assert main(words) == 2
    return seen[0]


def test_every_field_of_the_plan_is_tried() -> None:
    assert list(OTHER) == [field.name for field in fields(Plan)]
    assert not [f.name for f in fields(Plan) if OTHER[f.name] == f.default]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: shlex.join(command_line(plan))[:60])
def test_the_make_it_again_line_gives_an_equal_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(wording.command(plan, "m.infer"))
    assert words[:2] == ["infer", "optimize"]
    assert asked(words[1:], monkeypatch) == plan


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
    assert asked(words, monkeypatch) == plan


def test_a_plan_file_never_brings_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("trust_code = true\n")
    assert not asked(["optimize", "m.pt", "--plan", str(file)], monkeypatch).trust_code
    assert asked(["optimize", "m.pt", "--plan", str(file), "--trust-code"], monkeypatch).trust_code
    assert "--trust-code" in wording.again(PLANS[1], "m.infer")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('quantt = "int8"', "no option named 'quantt'.*Did you mean quant?"),
        ('dtype = "fp12"', "no compute dtype named 'fp12'"),
        ("dtype = 5", "no compute dtype named 5"),
        ("adapters = 5", "option adapters can't be 5"),
        ("max_batch = 0", "expected 1 or more for --max-batch, got 0"),
        ('max_batch = "many"', "Expected `int`, got `str`"),
        ("max_drop = 2.0", "expected a share"),
        ("bits = 40", "expected 1 to 32 for --bits"),
    ],
)
def test_a_wrong_plan_file_is_a_usage_error(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        optimize.read_plan(file, {"source": "m.pt"})
    assert str(file) in str(caught.value)


def test_save_plan_writes_what_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.toml"
    words = ["optimize", "m.pt", "--adapters", "4", "--layer", 'weird "name"=int8']
    made = asked([*words, "--save-plan", str(file)], monkeypatch)
    assert tomllib.loads(file.read_text())["adapters"] == "4"
    assert asked(["optimize", "m.pt", "--plan", str(file)], monkeypatch) == made


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
    with pytest.raises(UsageError, match="expected 1 to 3 for --one, got 4"):
        from_values(Bounded, {"one": 4})
