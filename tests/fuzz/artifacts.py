"""Artifacts of somebody else under mutation: each is refused with a sentence and the right exit code, or opens.

`python -m tests.fuzz.artifacts CASES SECONDS [SEED] [--quick]`. One file of an artifact is mutated and the hashes of
the manifest are made right again, as an attacker would; then a command or the server's worker opens it, in a forked
process with little memory. A hang, a crash, a traceback or a control character on the terminal is a failure.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.clone import main_worktree
from tests.support.mutations import mutation_for

KERNELS = main_worktree(Path(__file__).resolve().parents[2]) / ".pytest_cache" / "kernels"
MEMORY = 3 << 30  # bytes that one process may take beside what it began with
PATIENCE = 20.0  # seconds for one case
BATCH = 40  # cases that one process runs
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
FINE = {0, 3, 5, 7}
WEIGHT = {"manifest.json": 6, "model.onnx": 8, "graph.json": 3, "tokenizer.json": 4, "graph.pt2": 3}


@dataclass(frozen=True)
class Case:
    """One mutation: what was mutated, by which random numbers, and who opens it."""

    base: str
    file: str
    action: str
    seed: int


def verify(folder: Path, trust: bool) -> int:
    return _command(["verify", str(folder), *(["--trust-code"] if trust else [])])


def inspect(folder: Path, trust: bool) -> int:
    return _command(["inspect", str(folder)])


def report(folder: Path, trust: bool) -> int:
    return _command(["report", str(folder), "--html", str(folder.with_suffix(".html"))])


def serve(folder: Path, trust: bool) -> int:
    """Open the artifact as a server worker does, and inspect it as the front end does."""
    from infer.errors import InferError
    from infer.sanitize import sanitize_text
    from infer.serve import model_repository
    from infer.serve.observability import status_page
    from infer.serve.served_model import ServedModel
    from infer.serve.workers.model_loading import is_language_model

    try:
        is_language_model(folder)
        for found in model_repository.ModelRepository([folder]).latest():
            model_repository.name_and_version(found)
        from infer.predict.predictor import Predictor

        with Predictor.load(folder, trust_code=trust) as predictor:
            if not is_language_model(folder):
                predictor.warmup()
            status_page._reported(ServedModel.of(predictor))
    except InferError as error:
        print(f"infer: {sanitize_text(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def speak(folder: Path, trust: bool) -> int:
    """Use the artifact as a language model: text, ids, a chat."""
    from infer.errors import InferError, UsageError
    from infer.predict.predictor import Predictor
    from infer.sanitize import sanitize_text

    try:
        with Predictor.load(folder, trust_code=trust, kv_memory="1MiB") as predictor:
            language_model = predictor.language_model
            language_model.decode(language_model.encode("hello"))
            _ = language_model.config
            predictor.generate("hi", max_tokens=1)
            predictor.chat([{"role": "user", "content": "hello"}], max_tokens=1)
    except UsageError as error:  # it has no template, or no tokenizer
        print(f"infer: {sanitize_text(str(error))}", file=sys.stderr)
        return 0
    except InferError as error:
        print(f"infer: {sanitize_text(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def text(folder: Path, trust: bool) -> int:
    """Open the text files of a language model without the model."""
    from infer.artifact import store
    from infer.errors import InferError
    from infer.llm.text.chat_template import ChatTemplate
    from infer.llm.text.generation_config import GenerationConfig
    from infer.llm.text.tokenizer import LLMTokenizer
    from infer.sanitize import sanitize_text

    try:
        store.verify(folder, store.read_manifest(folder))
        found = LLMTokenizer(folder / "tokenizer.json")
        found.decode(found.encode("hello"))
        found.token_bytes(5)
        GenerationConfig.open(folder, found.tokenizer.get_vocab(True)).complete({})
        template = ChatTemplate.open(folder)
        if template is not None:
            template.check()
    except InferError as error:
        print(f"infer: {sanitize_text(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def _command(arguments: list[str]) -> int:
    from infer.cli import main

    return main(arguments)


ACTIONS: dict[str, Callable[[Path, bool], int]] = {
    a.__name__: a for a in (verify, inspect, report, serve, speak, text)
}


def bases(folder: Path, *, fake_llm: bool = True) -> None:
    """Make the artifacts that are mutated: tensors and text through ONNX Runtime, and tensors through plain torch.

    Without `fake_llm` the language model, which takes a while, is left out; the files of its text are there.
    """
    import numpy as np

    from bench.shared.unmeasured_memory import skip_memory
    from infer import Plan, optimize
    from tests.support.llm_artifacts import tiny

    skip_memory()
    (folder / "net.py").write_text(
        "import torch\ndef build():\n    torch.manual_seed(0)\n    return torch.nn.Sequential("
        "torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))\n"
    )
    np.savez(folder / "d.npz", input=np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    plan = Plan(
        source=f"{folder / 'net.py'}:build",
        quant="int8",
        data=str(folder / "d.npz"),
        inputs=("input=float32[batch,64]",),
        batches=(),
        max_error=1.0,
        backend="ort",
    )
    optimize(plan, folder / "tensors.infer")
    optimize(plan.with_(backend="eager"), folder / "torch.infer")
    _add_texts(folder / "tensors.infer")
    if not fake_llm:
        return
    (folder / "text").mkdir()
    tiny(folder / "text", speaks=True, backend="ort").rename(folder / "fake_llm.infer")


def _add_texts(made: Path) -> None:
    """Add a language model's text files to an artifact that does not use them, manifest included."""
    from tests.support.llm_artifacts import bytes_as_tokens

    bytes_as_tokens(made)
    (made / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.5, "top_k": 3}')
    said = json.loads((made / "manifest.json").read_bytes())
    for name in TEXTS:
        data = (made / name).read_bytes()
        said["files"][name], said["lengths"][name] = hashlib.sha256(data).hexdigest(), len(data)
    (made / "manifest.json").write_text(json.dumps(said))


def preload() -> None:
    """Import what the actions import, so that each forked process need not."""
    import jinja2  # noqa: F401
    import onnx_ir  # noqa: F401
    import onnxruntime  # noqa: F401
    import tokenizers  # noqa: F401

    import infer.cli.output
    import infer.report.inspection
    import infer.serve.observability.status_page
    import infer.serve.workers.__main__  # noqa: F401
    from infer.llm.text import jinja_sandbox  # noqa: F401
    from infer.llm.text.grammar import grammar  # noqa: F401


def cases(folder: Path, count: int, chance: random.Random) -> Iterator[Case]:
    weighed: list[tuple[str, str]] = []
    for base in sorted(folder.glob("*.infer")):
        for path in sorted(base.rglob("*")):
            if path.is_file() and path.name not in ("manifest.sig", "report.html"):
                weighed += [(base.name, str(path.relative_to(base)))] * WEIGHT.get(path.name, 1)
    for _ in range(count):
        base, file = chance.choice(weighed)
        yield Case(base, file, _action(base, file, chance), chance.getrandbits(60))


def _action(base: str, file: str, chance: random.Random) -> str:
    if file == "report.json":
        return chance.choice(["report", "report", "serve"])
    if file in TEXTS and base.startswith("tensors"):
        return "text"
    spoken = base.startswith("fake_llm") and not file.endswith((".onnx", ".data", ".safetensors"))
    if spoken and file != "manifest.json" and file != "graph.json":
        return "speak"
    if file in ("manifest.json", "golden/inputs.safetensors"):
        return chance.choice(["verify", "inspect", "report", "serve"])
    return chance.choice(["verify", "serve"])


def mutate(case: Case, bases_in: Path, work: Path) -> Path:
    """Build the mutated artifact: hard links to unchanged files, one new file, a consistent manifest."""
    base, made = bases_in / case.base, work / case.base
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(base, made, copy_function=os.link)
    chance, path = random.Random(case.seed), made / case.file
    changed = mutation_for(case.file)(path.read_bytes(), chance)
    path.unlink()
    path.write_bytes(changed)
    manifest = made / "manifest.json"
    if case.file != "manifest.json":
        said = json.loads(manifest.read_bytes())
        said["files"][case.file] = hashlib.sha256(changed).hexdigest()
        said.setdefault("lengths", {})[case.file] = len(changed)
        manifest.unlink()
        manifest.write_text(json.dumps(said))
    return made


def judge(code: int, said: str) -> str:
    """Return the outcome as one word; one that begins with `!` is a failure."""
    if "Traceback" in said or "internal error" in said:
        return "! traceback"
    if "EP Error" in said or "onnxruntime:" in said:
        return "! a library spoke"
    if any(
        ord(c) < 32 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u202d\u2066" for c in said
    ):
        return "! control characters"
    if code not in FINE:
        return f"! exit {code}"
    if code and not said.strip():
        return "! no sentence"
    return "opened" if code == 0 else f"refused, exit {code}"


def _child(todo: list[Case], bases_in: Path, work: Path, results: int) -> None:
    """Run cases and write a line for each, before and after."""
    import torch

    faulthandler.disable()
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.memfd_create("said")
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="surrogateescape", closefd=False, buffering=1)  # noqa: SIM115
    for case in todo:
        made = mutate(case, bases_in, work)
        os.write(results, b"begin\n")
        os.ftruncate(out, 0)
        os.lseek(out, 0, os.SEEK_SET)
        try:
            code = ACTIONS[case.action](made, case.base.startswith("torch"))
        except BaseException:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        said = os.pread(out, 1 << 16, 0).decode("utf-8", "surrogateescape")
        os.write(results, json.dumps([code, said[-3000:]]).encode() + b"\n")


def run_batch(todo: list[Case], bases_in: Path, work: Path) -> list[tuple[Case, str, str]]:
    """(case, outcome, what was said) of the cases that ran: all, or those up to one that ended the process."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            _child(todo, bases_in, work, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    lines, ended = _lines(ours), False
    found: list[tuple[Case, str, str]] = []
    began = False
    try:
        for line in lines:
            if line is None:
                ended = True
                break
            if line == b"begin":
                began = True
                continue
            code, said = json.loads(line)
            found.append((todo[len(found)], judge(code, said), said))
            began = False
    finally:
        if ended:
            os.kill(pid, signal.SIGKILL)
        os.close(ours)
        _, status = os.waitpid(pid, 0)
    if len(found) < len(todo) and (began or ended):
        how = f"! hung for {PATIENCE:.0f} s" if ended else f"! ended by {_how(status)}"
        found.append((todo[len(found)], how, ""))
    return found


def _how(status: int) -> str:
    return (
        signal.Signals(os.WTERMSIG(status)).name
        if os.WIFSIGNALED(status)
        else f"exit {os.WEXITSTATUS(status)}"
    )


def _lines(descriptor: int) -> Iterator[bytes | None]:
    """Lines as they come; None when none came in time."""
    held = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], PATIENCE)
        if not ready:
            yield None
            return
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return
        *whole, held = (held + piece).split(b"\n")
        yield from whole


def run(
    folder: Path, count: int, seconds: float, seed: int
) -> tuple[Counter[tuple[str, str]], list[tuple[Case, str, str]]]:
    """Run `count` cases; return counts by (file, outcome) and the failures."""
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[tuple[Case, str, str]] = []
    todo = list(cases(folder, count, random.Random(seed)))
    preload()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        while todo and time.monotonic() < deadline:
            found = run_batch(todo[:BATCH], folder, Path(work))
            todo = todo[max(len(found), 1) :]
            for case, outcome, said in found:
                counts[case.file.rpartition("/")[2], outcome] += 1
                if outcome.startswith("!"):
                    failures.append((case, outcome, said))
    return counts, failures


def table(counts: Counter[tuple[str, str]]) -> str:
    """One row a file, one column an outcome."""
    outcomes = sorted({outcome for _, outcome in counts})
    rows = [f"{'file':26s}" + "".join(f"{o:>22s}" for o in outcomes)]
    for file in sorted({file for file, _ in counts}):
        rows.append(f"{file:26s}" + "".join(f"{counts[file, o]:22d}" for o in outcomes))
    return "\n".join([*rows, f"{sum(counts.values())} mutated artifacts"])


def main(arguments: list[str]) -> int:
    numbers = [a for a in arguments if a != "--quick"]
    count = int(numbers[0]) if numbers else 100_000
    seconds = float(numbers[1]) if len(numbers) > 1 else 600.0
    seed = int(numbers[2]) if len(numbers) > 2 else time.time_ns()
    kept = os.environ.get("FUZZ_BASES")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["INFER_CACHE"], os.environ["INFER_CONFIG"] = f"{scratch}/cache", f"{scratch}/config"
        KERNELS.mkdir(parents=True, exist_ok=True)
        Path(f"{scratch}/cache").mkdir()
        Path(f"{scratch}/cache/kernels").symlink_to(KERNELS)  # which take a minute to compile
        folder = Path(kept or f"{scratch}/bases")
        if not folder.is_dir():
            folder.mkdir(parents=True)
            bases(folder, fake_llm="--quick" not in arguments)
        began = time.monotonic()
        counts, failures = run(folder, count, seconds, seed)
        print(table(counts), f"in {time.monotonic() - began:.0f} s, seed {seed}")
        for case, outcome, said in failures[:40]:
            print(f"\n{outcome}: {case}\n{said[-700:]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
