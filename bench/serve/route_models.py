"""Tiny random models of `route_transcripts`: BERT with four heads, T5 and Whisper, with tokenizers of letters."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = "a cat cats dog dogs sleep bark where do in the sun is an animal what day rain again on mat".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
MOODS = {"id2label": {0: "good", 1: "bad", 2: "dull"}, "label2id": {"good": 0, "bad": 1, "dull": 2}}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedder": ("BertModel", {}),
    "ranker": ("BertForSequenceClassification", {"num_labels": 1}),
    "moods": ("BertForSequenceClassification", MOODS),
    "filler": ("BertForMaskedLM", {}),
}
RATE, SECONDS, END, START = 16000, 2, 320, 321
IDS = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END}
GENERATION: dict[str, Any] = {
    **IDS, "no_timestamps_token_id": 326, "lang_to_id": {"<|en|>": 322, "<|de|>": 323},
    "task_to_id": {"transcribe": 324, "translate": 325}, "begin_suppress_tokens": [7, END], "is_multilingual": True,
    "suppress_tokens": [*range(3, 35), *range(97, 320), *range(START, 326)], "max_initial_timestamp_index": 50,
    "max_length": 40,
}  # fmt: skip
WHISPER = {
    "vocab_size": 430, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_source_positions": 50 * SECONDS, "max_target_positions": 40,
}  # fmt: skip


def make_all(folder: Path, progress: Callable[[str], None]) -> dict[str, Path]:
    """Make every model and return their artifacts by name: heads of BERT in eager, the others for ONNX Runtime."""
    from infer import Plan, optimize

    recordings = folder / "sounds"
    recordings.mkdir()
    (recordings / "a.wav").write_bytes(speech())
    makers: dict[str, tuple[Callable[[Path], None], str, str]] = {
        **{name: (lambda path, n=name: _bert(path, n), "eager", "random") for name in HEADS},  # type: ignore[misc]
        "t5-ort": (_t5, "ort", "random"),
        "whisper-ort": (_whisper, "ort", str(recordings)),
    }
    made = {}
    for name, (make, backend, data) in makers.items():
        progress(f"optimizing {name}")
        make(folder / "sources" / name)
        given: dict[str, Any] = {"backend": backend, "data": data, "batches": (), "allow_slower": True}
        plan = Plan(source=str(folder / "sources" / name), **given)
        made[name] = optimize(plan, folder / f"{name}.infer").path
    return made


def speech() -> bytes:
    """Return three seconds of noise as a WAV file."""
    samples = np.random.default_rng(0).normal(0, 0.1, 3 * RATE).clip(-1, 1)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, len(samples), "NONE", ""))
        out.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _random(model: Any) -> Any:
    """Return the model with weights so large that its answers differ from text to text."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)
    return model.eval()


def _bert(path: Path, name: str) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    head, more = HEADS[name]
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    config = transformers.BertConfig(**BERT, vocab_size=len(vocabulary), max_position_embeddings=64, **more)
    _random(getattr(transformers, head)(config)).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names)
    fast.save_pretrained(path)


def _letters(path: Path) -> None:
    """Save a tokenizer of bytes with <pad>, <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(path / "tokenizer.json"))


def _t5(path: Path) -> None:
    import transformers

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 320}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=2, pad_token_id=0)
    _random(transformers.T5ForConditionalGeneration(config)).save_pretrained(path)
    _letters(path)


def _whisper(path: Path) -> None:
    import transformers

    model = _random(
        transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER, **IDS))
    )
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    model.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(path)
    _letters(path)
