"""`infer generate` and `infer chat` as people use them: on terminals, in pipes, with mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from infer import Predictor
from infer.cli import main
from infer.llm.llm import LanguageModel
from infer.llm.text.chat_template import FILE
from tests.support.llm_artifacts import PYDOC, tiny
from tests.support.tiny_decoders import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("lm"), speaks=True, batches=(1,))


@pytest.fixture
def opened_once(monkeypatch: pytest.MonkeyPatch, lm: Path, kept: dict[str, Predictor]) -> None:
    """Keep `lm` open for calls of `infer generate` and `infer chat`, which saves most of their time; anything else, and
    any option of opening, they open themselves.
    """
    load = Predictor.load

    def opened(path: Path, **options: Any) -> Any:
        if Path(path) != lm or any(value not in (None, False, "auto") for value in options.values()):
            return load(path, **options)
        if "lm" not in kept:
            kept["lm"] = load(path)
        return contextlib.nullcontext(kept["lm"])

    monkeypatch.setattr(Predictor, "load", opened)


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, Predictor]]:
    found: dict[str, Predictor] = {}
    yield found
    for predictor in found.values():
        predictor.close()


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_prompt_is_completed(lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "generate",
                str(lm),
                "Return the",
                "--max-tokens",
                "6",
                "--temperature",
                "0",
                "--ignore-eos",
                "--json",
            ]
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert (made["finish_reason"], made["prompt_tokens"], len(made["token_ids"])) == ("length", 10, 6)
    assert (
        main(["generate", str(lm), "Return the", "--max-tokens", "6", "--temperature", "0", "--ignore-eos"])
        == 0
    )
    assert capsys.readouterr().out == made["text"] + "\n"


@pytest.mark.usefixtures("opened_once")
def test_the_prompt_may_come_from_a_pipe(
    lm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for arguments in (["Return the"], ["-"], []):
        typed(monkeypatch, "Return the\n")
        assert main(["generate", str(lm), *arguments, "--max-tokens", "5", "--seed", "1"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


@pytest.mark.usefixtures("opened_once")
def test_streamed_text_is_the_same_text(lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", str(lm), "import", "--max-tokens", "8", "--seed", "2", "--ignore-eos"]
    assert main(call) == main([*call, "--stream"]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert main([*call, "--stream", "--json"]) == 0
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(p["text"] for p in pieces) + "\n" == out[: len(out) // 2]
    assert pieces[-1]["finish_reason"] == "length"


def test_a_model_that_ends_at_once_is_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(range(320))
    ending = str(tiny(tmp_path, speaks=True, sizes={**SIZES["llama"], "eos_token_id": every}))
    capsys.readouterr()
    sentence = "the text is empty: the model ended it at once\n"
    for options in ([], ["--stream"], ["-n", "2"]):
        assert main(["generate", ending, "x", *options]) == 0
        captured = capsys.readouterr()
        assert not captured.out.replace("---", "").strip()
        assert captured.err == f"infer: {sentence}"
    typed(monkeypatch, "One\n")
    assert main(["chat", ending]) == 0
    assert capsys.readouterr().err == sentence
    assert (
        main(["bench", ending, "--batch", "1", "--context", "8", "--tokens", "2", "--seconds", "0.05"]) == 0
    )


@pytest.mark.usefixtures("opened_once")
def test_several_completions_and_constraints(
    lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    assert main(["generate", str(lm), "x", "-n", "2", "--choice", "yes", "--choice", "no", "--json"]) == 0
    assert {made["text"] for made in json.loads(capsys.readouterr().out)} <= {"yes", "no"}
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    assert main(["generate", str(lm), "x", "--json-schema", str(schema)]) == 0
    assert capsys.readouterr().out.strip() in ("true", "false")


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ["generate", "LM", "x", "--temperature", "-1"],
            2,
            "expected --temperature between 0 and 100, got -1",
        ),
        (["generate", "LM", "x", "--top-p", "2"], 2, "expected --top-p above 0 and at most 1, got 2"),
        (["generate", "LM", "x" * 5000], 2, "the model has positions for 256"),
        (["generate", "LM", "x", "--max-tokens", "600"], 2, "need 601 tokens"),
        (["generate", "LM", "x", "--stream", "-n", "2"], 2, "--stream shows one completion, not 2"),
        (["generate", "LM", "x", "--json-schema", "absent"], 2, "the schema can't be read"),
        (
            ["generate", "LM", "x", "--regex", "a", "--choice", "b"],
            2,
            "expected one constraint on the output",
        ),
        (["generate", "LM", "x", "--kv-memory", "lots"], 2, "expected a size like 2GiB"),
        (["generate", "LM", "x", "--kv-memory", "10"], 7, "the KV cache got 10 bytes, but one page takes"),
        (["generate", "BARE", "hello"], 2, "tiny has no tokenizer.json. Give token ids"),
        (["chat", "BARE"], 2, "has no chat template, so it takes no messages. Give one: infer optimize"),
        (["chat", "absent"], 3, "not an artifact"),
        (["optimize", "x.pt", "--kv-dtype", "int4"], 2, "no dtype of the KV cache named 'int4'"),
        (["optimize", str(PYDOC), "--chat-template", "absent"], 2, "the chat template can't be read"),
    ],
)
def test_every_generate_usage_error_has_message_and_exit_code(
    lm: Path,
    tiny_artifact: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    places = {"LM": str(lm), "BARE": str(tiny_artifact)}
    assert main([places.get(a, a) for a in arguments]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("opened_once")
def test_a_piped_chat_answers_each_line(
    lm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(
        monkeypatch, "One\\\ntwo\n\n/system Be brief.\nThree\n/stats\n/reset\n/nonsense\n/help\n/exit\nnever"
    )
    assert main(["chat", str(lm), "--max-tokens", "4", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert "system message: Be brief." in captured.err
    assert "2: 4 tokens, the first after " in captured.err
    assert "8 tokens answered; the KV cache holds " in captured.err
    assert "conversation cleared" in captured.err
    assert "no command named /nonsense; /help lists the commands" in captured.err
    assert "Ctrl-C          stop an answer" in captured.err
    assert captured.out.strip()
    assert "tokens answered" not in captured.out


def test_inspect_says_how_the_model_writes_calls_and_thoughts(
    lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(lm), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tool form"] == "hermes: its chat template shows no form of calls: the usual one"
    assert said["reasoning form"] == "none: its chat template shows no mark of a thought"


@pytest.mark.usefixtures("opened_once")
def test_a_full_context_leaves_out_the_oldest_turns(
    lm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, f"{'word ' * 20}\n{'more ' * 20}\n{'x' * 900}\nshort\n")
    assert main(["chat", str(lm), "--max-tokens", "4", "--seed", "1"]) == 0
    said = capsys.readouterr().err
    assert said.count("the context of 256 tokens is full: the oldest 2 messages were dropped") == 1
    assert "the model has positions for 256" in said


# `infer` with a model whose answers take seconds, however many tokens a step brings.
PATIENT = """
import runpy, time
from infer.llm.engine.engine import Engine
step = Engine.step
Engine.step = lambda self: time.sleep(0.1) or step(self)
runpy.run_module("infer", run_name="__main__")
"""


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(lm: Path) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PATIENT,
        "chat",
        str(lm),
        "--max-tokens",
        "200",
        "--temperature",
        "0",  # whose answer is known not to end before
        "--stop",
        "never",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = ""

        def until(pattern: str) -> None:
            nonlocal shown
            deadline = time.monotonic() + 200
            while not re.search(pattern, shown, re.DOTALL):
                if time.monotonic() > deadline:
                    process.kill()  # or leaving the block would wait for it
                    pytest.fail(shown)
                if select.select([ours], [], [], 1)[0]:
                    shown += os.read(ours, 4096).decode(errors="replace")

        until("/help lists the commands")
        until("> ")
        os.write(ours, b"hello\n")
        until("hello\r\n.")  # more than the echo: the answer has begun
        process.send_signal(signal.SIGINT)
        until(r"\(stopped\)")
        until("; prompt ")
        os.write(ours, b"/exit\n")
        assert process.wait(60) == 0
    os.close(ours)


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize("step", ["chat_ids", "parser"])
def test_ctrl_c_before_the_answer_begins_leaves_the_message_out(
    step: str, lm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "long\nshort\n")
    done = getattr(LanguageModel, step)

    def interrupted(self: LanguageModel, *given: Any, **options: Any) -> Any:
        if "long" in str(given) or step == "parser" and not stopped:
            stopped.append(step)
            raise KeyboardInterrupt
        return done(self, *given, **options)

    stopped: list[str] = []
    monkeypatch.setattr(LanguageModel, step, interrupted)
    assert main(["chat", str(lm), "--max-tokens", "4", "--seed", "1"]) == 0
    assert stopped
    assert capsys.readouterr().out.startswith(" (stopped)\n")


def test_a_template_can_be_given_when_optimizing(tiny_artifact: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    source = tiny_artifact.parent / "tiny"
    call = [
        "optimize",
        str(source),
        "--backend",
        "eager",
        "--data",
        "random",
        "--batch",
        "1",
        "--allow-slower",
    ]
    target = tmp_path / "t.infer"
    assert main([*call, "--chat-template", str(template), "--kv-dtype", "int8", "--output", str(target)]) == 0
    assert (target / FILE).read_text() == template.read_text()
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["meta"]["generation"]["kv_dtype"] == "int8"
    assert "--kv-dtype int8" in json.loads((target / "report.json").read_text())["command"]
    template.write_text("{% if %}")
    assert main([*call, "--chat-template", str(template), "--output", str(tmp_path / "u.infer")]) == 3


def test_bench_of_a_language_model_counts_tokens(lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["bench", str(lm), "--batch", "1,3", "--context", "16,40", "--tokens", "4", "--seconds", "0.05"]
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["context"]) for row in found["rows"]] == [(1, 16), (3, 16), (1, 40), (3, 40)]
    for row in found["rows"]:
        assert row["decode_per_second"] == pytest.approx(row["batch"] / row["between_tokens"]["p50"])
        assert row["floor"] > 0
        assert row["first_token"]["p50"] > 0
        assert row["budget"]["sampling"] > 0
        assert sum(row["budget"].values()) > row["budget"]["engine"] > 0
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    assert found["kv_memory"] >= found["kv_tokens"] * found["kv_bytes_per_token"]


def test_bench_times_steps_of_all_although_prompts_take_many_steps(
    lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["bench", str(lm), "--batch", "8", "--context", "120", "--tokens", "2", "--seconds", "0.05"]
    assert main([*call, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["between_tokens"]["n"] == row["first_token"]["n"] / 8


def test_bench_against_another_artifact_is_paired(lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["bench", str(lm), "--batch", "1", "--context", "8", "--tokens", "4", "--seconds", "0.05"]
    assert main([*call, "--vs", str(lm)]) == 0
    out = capsys.readouterr().out
    assert "KV cache float32, 512 B a token" in out
    assert "step ÷ tiny" in out


def test_bench_refuses_options_that_do_not_fit_the_model(
    lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(lm), "--batch", "1", "--context", "250"]) == 2
    said = capsys.readouterr().err
    assert "a context of 250 and 32 tokens after it are more than the 256 positions" in said
    assert main(["bench", str(lm), "--batch", "8", "--context", "220"]) == 2
    said = capsys.readouterr().err
    assert (
        "a context of 220, 13 while 8 prompts are read, and 32 tokens after it are more than the 256" in said
    )


def test_the_report_of_a_language_model_counts_decode_steps(
    lm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(lm)]) == 0
    said = capsys.readouterr().out
    assert "Decode step, 128 tokens in the cache\nInterleaved with torch eager; " in said
    assert "tokens/s" in said
    assert "rows/s" not in said
    assert "512 B a token (float32, pages of 32 tokens)" in said
    assert "a decode step at batch 1, " in said
    page = (lm / "report.html").read_text()
    assert "<h2>Decode step, 128 tokens in the cache</h2>" in page
    assert json.loads((lm / "report.json").read_text())["decodes"] is True
