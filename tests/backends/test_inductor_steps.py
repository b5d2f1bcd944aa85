"""A language model lowered by inductor, with room for adapters: it says what it says uncompiled, whatever the batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from infer import Predictor
from infer.cli import main
from infer.kernels.cpu import build as compiling
from tests.llm.test_lora import peft
from tests.support.llm_artifacts import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the exporter has many to give
    pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler"),
]
LAYERS = {
    f"model.layers.{i}.{name}": size
    for i in range(2)
    for name, size in (("self_attn.q_proj", (64, 64)), ("self_attn.v_proj", (64, 32)), ("mlp.down_proj", (96, 64)))
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8], [9] * 40, [3], [40, 30, 20, 10] * 20]
ASKED = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
SERVED = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch
from infer import Predictor
started = []
sys.addaudithook(lambda event, args: started.append(str(args[0])) if event == "subprocess.Popen" else None)
def compiled():
    return sum(sum(counts.values()) for counts in counters.values())
with Predictor.load(FOLDER, kv_memory="8MiB", adapters=ADAPTERS) as p:
    p.generate([1, 2, 3], max_tokens=2)
    compilers = [name for name in ("torch._inductor", "torch._dynamo") if name in sys.modules]
    from torch._dynamo.utils import counters
    before, started[:] = compiled(), []
    made = {str(a): [c.token_ids for c in p.generate(PROMPTS, adapter=a, **ASKED)] for a in (None, *ADAPTERS)}
    for count in range(1, 24):
        p.generate([[7] * length for length in range(1, count + 1)], max_tokens=count, ignore_eos=True)
    after = compiled()
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
print(json.dumps({"made": made, "compiled": after - before, "started": started, "counts": compiled() > after,
                  "compilers": compilers}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def adapters(home: Path) -> dict[str, str]:
    return {
        name: str(peft(home / name, LAYERS, seed=i, lora_alpha=12)) for i, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def plain(home: Path, adapters: dict[str, str]) -> Iterator[Predictor]:
    """Load the same step in eager mode."""
    (home / "eager").mkdir()
    made = tiny(home / "eager", quant="int8:weight", adapters="2:4")
    with Predictor.load(made, kv_memory="8MiB", adapters=adapters) as predictor:
        yield predictor


def test_a_compiled_step_serves_any_batch_and_adapter_as_it_is(
    home: Path, plain: Predictor, adapters: dict[str, str], run_python: Callable[[str], str]
) -> None:
    (home / "inductor").mkdir()
    made = tiny(home / "inductor", backend="inductor", quant="int8:weight", adapters="2:4")
    given = {"FOLDER": str(made), "ADAPTERS": adapters, "PROMPTS": PROMPTS, "ASKED": ASKED}
    names = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    said = json.loads(run_python(names + SERVED).strip().rpartition("\n")[2])
    expected = {
        str(a): [c.token_ids for c in plain.generate(PROMPTS, adapter=a, **ASKED)] for a in (None, *adapters)
    }
    assert said["made"] == expected
    assert len({json.dumps(tokens) for tokens in expected.values()}) == 3
    assert (said["compiled"], said["started"]) == (0, [])
    assert said["counts"]  # what is compiled is noticed
    assert said["compilers"] == []  # of torch: importing them takes longer than opening the artifact


def test_the_report_breaks_down_a_decode_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny(tmp_path, quant="int8:weight", batches=(1,))
    report = json.loads((made / "report.json").read_text())
    (step,) = report["steps"]
    assert step.pop("batch") == 1
    assert all(seconds >= 0 for seconds in step.values())
    assert step["weights"] > 0 < step["other"]
    assert main(["report", str(made)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"goes into weights \d+ %, .*rows \d+ %, .* batch 1", said)
    assert "goes into" in (made / "report.html").read_text()
