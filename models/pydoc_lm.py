"""A small Llama-architecture language model of CPython's own documentation and sources.

    python models/pydoc_lm.py train --minutes 56
    python models/pydoc_lm.py eval

About 7 M parameters, byte-level BPE of 4096 tokens, context 512. The weights beside this file are what
`train` gave; `samples.txt` is held-out text, and every perplexity here is over it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).with_suffix("")
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
VOCAB, CONTEXT = 4096, 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TIMES_PER_EPOCH = {"topic": 4, "builtin": 2, "prose": 3, "code": 1}
# It has read documentation and code, never a conversation: a message is a paragraph, an answer what may come next.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {{- message.content | trim + '\\n\\n' }}
{%- endfor %}
"""
RECOMMENDED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
SAMPLE_BYTES, LONGEST_SAMPLE = 40_000, 4_000
NUM_CALIBRATION = 24  # documents


def checkpoint_folder() -> Path:
    """Return the Hugging Face folder: config, model.safetensors (float16), tokenizer, chat template, samples.txt."""
    return FOLDER


def corpus() -> list[Any]:
    """Return `Document(name, kind, text, held_out)` for everything this Python ships; see pydoc_corpus.py."""
    return _sibling("pydoc_corpus").corpus()


def samples() -> list[str]:
    """Return the held-out documents shipped with the model: two blank lines apart in samples.txt."""
    return (FOLDER / "samples.txt").read_text(encoding="utf-8").strip("\n").split("\n\n\n")


def calibration() -> list[str]:
    """Return the beginnings of training documents, evenly over the corpus, for calibration; samples.txt judges."""
    documents = [doc for doc in corpus() if not doc.held_out and doc.kind != "code"]
    step = max(len(documents) // NUM_CALIBRATION, 1)
    return [doc.text[:LONGEST_SAMPLE] for doc in documents[::step]]


def train_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer` that puts the begin token before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def held_out_ids(batch: int | None = None, seq: int = 256) -> Tensor:
    """Return int64 [batch, seq]: samples.txt, its documents packed one after another. All whole rows if None."""
    rows = _packed().unfold(0, seq, seq)
    if batch is not None and batch > len(rows):
        raise ValueError(f"asked for {batch} rows of {seq} tokens, samples.txt holds {len(rows)}")
    return rows[:batch].clone()


@lru_cache(maxsize=1)
def _packed() -> Tensor:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return torch.tensor([token for text in samples() for token in [*tokenizer.encode(text).ids, 1]])


def evaluate(logits_fn: Callable[[Tensor], Any], batch: int = 8, seq: int = 256) -> dict[str, float]:
    """Return perplexity over samples.txt. `logits_fn`: int64 [batch, seq] -> float [batch, seq, vocab], or numpy.

    Each row is scored from its second token on. `bits_per_byte` is the same figure free of the tokenizer.
    """
    rows = held_out_ids(seq=seq)
    loss, count = 0.0, 0
    for ids in rows.split(batch):
        logits = torch.as_tensor(logits_fn(ids)).float()[:, :-1]
        loss += nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        ).item()
        count += ids[:, 1:].numel()
    bytes_per_token = sum(len(text.encode()) for text in samples()) / len(_packed())
    mean = loss / count
    return {"perplexity": math.exp(mean), "bits_per_byte": mean / math.log(2) / bytes_per_token}


def unigram_perplexity(seq: int = 256) -> float:
    """Return the perplexity of guessing by frequency on the same tokens, with that text's own frequencies."""
    scored = held_out_ids(seq=seq)[:, 1:].flatten()
    share = torch.bincount(scored).double() / len(scored)
    return float(torch.exp(torch.special.entr(share).sum()))


def load() -> nn.Module:
    """Load the committed weights as a float32 `LlamaForCausalLM` in eval mode."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Map int64 [batch, seq] to float32 [batch, seq, vocab]."""

    @torch.no_grad()
    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits

    return logits


def train(minutes: float = 56.0, resume: str | None = None) -> dict[str, float]:
    """Make the whole folder again: samples, tokenizer, weights.

    Checkpoints go to the folder `resume`, and a run that was cut off goes on from there. The text is this Python's, the
    steps are this machine's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    trainer, documents = _sibling("train_pydoc_lm"), corpus()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "samples.txt").write_text(choose_samples(documents), encoding="utf-8")
    learned = [doc for doc in documents if not doc.held_out]
    tokenizer = train_tokenizer([doc.text for doc in learned for _ in range(TIMES_PER_EPOCH[doc.kind])])
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    _packed.cache_clear()
    encoded = tokenizer.encode_batch([doc.text for doc in learned])
    streams = [
        ([*each.ids, 1], TIMES_PER_EPOCH[doc.kind]) for each, doc in zip(encoded, learned, strict=True)
    ]
    counts: Counter[str] = Counter()
    for (ids, _), doc in zip(streams, learned, strict=True):
        counts[f"{doc.kind}_tokens"] += len(ids)
    print(json.dumps(counts), flush=True)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    folder = Path(resume or tempfile.mkdtemp(prefix="pydoc_lm."))
    log = trainer.train_for(model, streams, minutes, folder, measure=lambda: _score(model)["perplexity"])
    save(model)
    return counts | log | _score(load())


def choose_samples(documents: list[Any]) -> str:
    """Return about 40 KB of held-out text, topics first; long documents give their beginning."""
    order = {"topic": 0, "builtin": 1, "prose": 2}
    texts: list[str] = []
    for doc in sorted(
        (doc for doc in documents if doc.held_out), key=lambda doc: (order[doc.kind], doc.name)
    ):
        text = doc.text
        if len(text) > LONGEST_SAMPLE:
            text = text[:LONGEST_SAMPLE].rsplit("\n\n", 1)[0]
        if sum(map(len, texts)) + len(text) <= SAMPLE_BYTES:
            texts.append(text)
    return "\n\n\n".join(texts) + "\n"


def save(model: nn.Module) -> None:
    """Write the weights in float16, with the config and tokenizer files transformers wants."""
    from transformers import PreTrainedTokenizerFast

    half = copy.deepcopy(model).to(torch.float16).eval()
    half.generation_config.update(**RECOMMENDED)
    half.save_pretrained(FOLDER)
    PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(FOLDER)


def _score(model: nn.Module) -> dict[str, float]:
    training = model.training
    figures = evaluate(logits_of(model.eval()))
    model.train(training)
    return figures


def _sibling(name: str) -> ModuleType:
    """Import NAME.py beside this file by path: this file may itself have been loaded by path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}.py is not beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "eval"])
    parser.add_argument("--minutes", type=float, default=56.0, help="wall-clock time of the training itself")
    parser.add_argument("--resume", help="folder of checkpoints to begin with, and to go on from")
    args = parser.parse_args()
    figures = train(args.minutes, args.resume) if args.what == "train" else _score(load())
    print(json.dumps(figures | {"unigram_perplexity": unigram_perplexity()}))


if __name__ == "__main__":
    main()
