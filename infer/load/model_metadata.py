"""Metadata of a Hugging Face folder that serving needs: limits, token ids, labels, pooling, preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..regular_files import read_json
from . import heads
from .heads.image_decoders import decoder_config, own_prompts, own_tokens
from .hf_preprocessor import Preprocessor
from .sentence_transformers.sentence_folder import SentenceFolder, score_activation

GENERATION = "generation_config.json"
# Of generation_config.json, and of config.json in older checkpoints.
UNUSED_SETTINGS = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_eos_token_id"),
)
TRANSCRIPT_SETTINGS = ("suppress_tokens", "begin_suppress_tokens")  # applied where sound is transcribed
LARGE_VOCAB = 10**30  # tokenizers say "no limit" by numbers above this


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the tokens that answers of masked language models and CTC need, as tokenizer_config.json names them."""
    config, tokens = read_json(folder / "tokenizer_config.json", absent_ok=True), dict[str, str]()
    for name, key in (("mask_token", "mask_token"), ("word_delimiter", "word_delimiter_token")):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def head_metadata(
    head: heads.Head, preprocessor: Preprocessor | None, settings: Any, folder: Path
) -> dict[str, Any]:
    """Return what serving needs of a head and of its image processor or feature extractor."""
    meta = processor_metadata(preprocessor, settings)
    if head.decodes_images:
        meta |= image_decoder_metadata(head.ending, settings, folder)
    if head == heads.DUAL_TOWERS:
        meta |= heads.whole_meta(settings)
    return meta


def processor_metadata(preprocessor: Preprocessor | None, settings: Any) -> dict[str, Any]:
    """Return the preprocessing, and of CTC the samples of sound that a frame of outputs stands for, where known."""
    meta = {} if preprocessor is None else {"preprocessing": msgspec.to_builtins(preprocessor)}
    ratio = getattr(settings, "inputs_to_logits_ratio", None)
    return {**meta, "samples_per_frame": int(ratio)} if ratio else meta


def unused_generation_settings(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the limitation that generation settings of an encoder-decoder are not applied, [] without any.

    Such checkpoints are often published with beam search; the engine takes one token after the other.
    """
    merged = {**config, **read_json(folder / GENERATION, absent_ok=True)}
    beams = merged.get("num_beams")
    ignored = [f"num_beams {beams}"] if isinstance(beams, int) and beams > 1 else []
    applied = TRANSCRIPT_SETTINGS if "no_timestamps_token_id" in merged else ()
    unused = (name for name in UNUSED_SETTINGS if name not in applied)
    ignored += [name for name in unused if merged.get(name) not in (None, 0, [], False)]
    if not config.get("is_encoder_decoder") or not ignored:
        return []
    return [f"the checkpoint asks for {', '.join(ignored)}, which generation here does not apply"]


def decoder_start_ids(config: Mapping[str, Any], folder: Path) -> list[int]:
    """Return the tokens with which the decoder of an encoder-decoder begins, a forced first one among them."""
    merged = {**config, **read_json(folder / GENERATION, absent_ok=True)}
    start = merged.get("decoder_start_token_id")
    named = (merged.get("bos_token_id") if start is None else start, merged.get("forced_bos_token_id"))
    return [token for token in named if isinstance(token, int)]


def image_decoder_metadata(name: str, settings: Any, folder: Path) -> dict[str, Any]:
    """Return how the decoder of a model of images begins with a prompt, and the tokens that end its text.

    `name`: the class. The latter only where the checkpoint's generation settings lack them or the family has others.
    """
    merged = {**read_json(folder / "config.json"), **read_json(folder / GENERATION, absent_ok=True)}
    meta = own_prompts(name, settings)
    end = None if merged.get("eos_token_id") is not None else decoder_config(settings).eos_token_id
    end = own_tokens(name, settings).get("eos_token_id", end)
    return meta if end is None else {**meta, "end_ids": end if isinstance(end, list) else [end]}


def metadata(
    config: dict[str, Any], task: str, sentence: SentenceFolder, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """Collect the metadata that serving needs, as JSON: limits, token ids, labels, pooling."""
    folder, limits = sentence.transformer, [sizes["seq"][1]] if "seq" in sizes else []
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        value = read_json(folder / name, absent_ok=True).get(key)
        if isinstance(value, int | float) and 0 < value < LARGE_VOCAB:
            limits.append(int(value))
    meta: dict[str, Any] = {
        "architecture": heads.architecture(config),
        "model_type": config.get("model_type"),
        **({"max_length": min(limits)} if limits else {}),
        "vocab_size": config.get("vocab_size"),
        "problem_type": config.get("problem_type"),
        "pad_id": config.get("pad_token_id"),
        "bos_id": config.get("bos_token_id"),
        "eos_id": config.get("eos_token_id"),
    }
    if config.get("is_encoder_decoder") and task == "text-generation":
        meta["decoder_start_ids"] = decoder_start_ids(config, folder)
    if isinstance(config.get("id2label"), dict) and task != "multiple-choice":
        meta["labels"] = [
            str(label) for _, label in sorted(config["id2label"].items(), key=lambda kv: int(kv[0]))
        ]
    meta |= _special_tokens(folder)
    if task == "classification" and (named := score_activation(config, folder / "config.json")):
        meta["activation"] = named
    described = task in ("classification", "embedding") or sentence.multi_vector is not None
    return meta | (sentence.meta() if described else {})
