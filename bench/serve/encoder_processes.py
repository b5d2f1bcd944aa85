"""Models, texts and server processes of `encoder_goodput`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from bench.kernels import whole_models_rivals as rivals
from bench.kernels.whole_models_sources import Embedder
from bench.serve import encoder_servers
from bench.serve.serving import Server, free_port, serving
from bench.shared.example_models import plan
from bench.shared.repository import MODELS, ROOT, module_command

KEPT = ROOT / ".work" / "encoder-goodput"


@dataclass(frozen=True)
class Prepared:
    """A model and its requests; `lengths`: tokens of each text; `vectors`: the float model's, of the first texts."""

    folder: Path
    artifact: Path
    openvino: Path
    texts: list[str]
    lengths: list[int]
    vectors: np.ndarray

    @property
    def name(self) -> str:
        """Name of the artifact, by which every server is asked."""
        found: str = json.loads((self.artifact / "manifest.json").read_text())["name"]
        return found


def prepare(
    name: str, span: tuple[int, int], count: int, backend: str, say: Callable[[str], None]
) -> Prepared:
    """Return what is kept of a model, made where it is missing."""
    import torch

    from infer import optimize

    place = KEPT / name
    place.mkdir(parents=True, exist_ok=True)
    folder = _folder(name, place)
    texts, lengths, rows = draw_texts(folder, span, count)
    artifact, openvino, kept = (
        place / part for part in ("encoder.infer", "openvino-int8.xml", "vectors.npy")
    )
    if not artifact.exists():
        say(f"{name}: making the artifact")
        given = {
            "source": str(folder),
            "quant": "int8",
            "backend": backend,
            "batches": (),
            "allow_slower": True,
        }
        optimize(plan("minilm", **given), artifact)
    if not openvino.exists() and rivals.missing("OpenVINO") is None:
        say(f"{name}: making OpenVINO's int8")
        encoder_servers.make_openvino(str(folder), [rows[at : at + 8] for at in range(0, 64, 8)], place)
    if not kept.exists():
        with torch.no_grad():
            batch = encoder_servers.batch_of(rows[:16])
            module = Embedder("sdpa", folder).eval()
            np.save(kept, module(**{key: torch.from_numpy(value) for key, value in batch.items()}).numpy())
    return Prepared(folder, artifact, openvino, texts, lengths, np.load(kept))


def draw_texts(
    folder: Path, span: tuple[int, int], count: int
) -> tuple[list[str], list[int], list[list[int]]]:
    """Return texts of log-uniform length in tokens, their lengths, and their token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    words = [word for word, number in vocabulary if 2000 < number < 20000 and re.fullmatch("[a-z]{3,}", word)]
    draw, texts = np.random.default_rng(0), []
    for length in np.exp(draw.uniform(np.log(span[0]), np.log(span[1] + 1), count)).astype(int):
        texts.append(" ".join(draw.choice(words, length - 2)))
    rows = [tokenizer.encode(text).ids[: span[1]] for text in texts]
    return texts, [len(row) for row in rows], rows


def _folder(name: str, place: Path) -> Path:
    """Return the Hugging Face folder of a model: MiniLM's own, or BERT-base with random weights and MiniLM's files."""
    import torch

    sys.path.insert(0, str(MODELS))
    import minilm

    if name == "minilm":
        return minilm.checkpoint_folder()
    folder = place / "folder"
    if not folder.exists():
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        work = place / "unfinished"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(minilm.checkpoint_folder(), work)
        BertModel(BertConfig()).eval().save_pretrained(work)
        pooling = work / "1_Pooling" / "config.json"
        pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "word_embedding_dimension": 768}))
        work.rename(folder)
    return folder


def started(engine: str, model: Prepared, batch_tokens: int) -> AbstractContextManager[Server]:
    """Start a server of the engine in a process of its own; its port and process once it embeds a text."""
    port, folder = free_port(), str(model.folder)
    listen = ["--port", str(port)]
    if engine == "infer":
        words = ["infer", "serve", str(model.artifact), *listen, "--threads", "1", "--no-log-requests"]
    elif engine == "infinity":
        words = ["infinity_emb.cli", "v2", "--model-id", folder, *listen, "--url-prefix", "/v1"]
        words += ["--served-model-name", model.name, "--engine", "torch", "--device", "cpu"]
        words += ["--dtype", "float32", "--batch-size", "32"]
    else:
        words = ["bench.serve.encoder_servers", engine, folder, str(model.openvino), str(batch_tokens)]
        words.append(str(port))

    def embeds(port: int) -> bool:
        asked = {"model": model.name, "input": "hello", "encoding_format": "base64"}
        with suppress(httpx.HTTPError):
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=asked, timeout=30)
            return answer.status_code == 200
        return False

    offline = {"OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    log = KEPT / f"{engine}.log"
    return serving(module_command(*words), port=port, log=log, answers=embeds, **offline)
