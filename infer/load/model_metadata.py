"""Metadata of a Hugging Face folder that serving needs: limits, token ids, labels, pooling, preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..regular_files import read_json
from . import heads
from .heads.image_decoders import decoder_config, own_prompts, own_tokens
from .sentence_transformers.sentence_folder import score_activation
from .sources.folder_model import FolderModel

GENERATION = "generation_config.json"
# Of generation_config.json, and of config.json in older checkpoints.
UNUSED_SETTINGS = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_eos_token_id"),
)
TRANSCRIPT_SETTINGS = ("suppress_tokens", "begin_suppress_tokens")  # applied where sound is transcribed
LARGE_VOCAB = 10**30  # tokenizers say "no limit" by numbers above this


def unused_generation_settings(model: FolderModel) -> tuple[str, ...]:
    """Return the limitation that generation settings of an encoder-decoder are not applied, none without any.

    Such checkpoints are often published with beam search; the engine takes one token after the other.
    """
    merged = _generation(model.config, model.folder)
    beams = merged.get("num_beams")
    ignored = [f"num_beams {beams}"] if isinstance(beams, int) and beams > 1 else []
    applied = TRANSCRIPT_SETTINGS if "no_timestamps_token_id" in merged else ()
    unused = (name for name in UNUSED_SETTINGS if name not in applied)
    ignored += [name for name in unused if merged.get(name) not in (None, 0, [], False)]
    generates = model.head.task == "text-generation" and model.config.get("is_encoder_decoder")
    if not generates or not ignored:
        return ()
    return (f"the checkpoint asks for {', '.join(ignored)}, which generation here does not apply",)


def metadata(model: FolderModel, sizes: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Collect the metadata that serving needs, as JSON: limits, token ids, labels, pooling, preprocessing."""
    config, folder, sentence, task = model.config, model.folder, model.sentence, model.head.task
    limits = [sizes["seq"][1]] if "seq" in sizes else []
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
        meta["decoder_start_ids"] = _decoder_start_ids(_generation(config, folder))
    if isinstance(config.get("id2label"), dict) and task != "multiple-choice":
        meta["labels"] = [
            str(label) for _, label in sorted(config["id2label"].items(), key=lambda kv: int(kv[0]))
        ]
    meta |= _special_tokens(folder)
    if task == "classification" and (named := score_activation(config, folder / "config.json")):
        meta["activation"] = named
    if task in ("classification", "embedding") or sentence.multi_vector is not None:
        meta |= sentence.meta()
    if model.preprocessor is not None:
        meta["preprocessing"] = msgspec.to_builtins(model.preprocessor)
    if ratio := getattr(model.settings, "inputs_to_logits_ratio", None):
        meta["samples_per_frame"] = int(ratio)  # of CTC, samples of sound that a frame of outputs stands for
    if model.head.decodes_images:
        meta |= _image_decoder(model)
    return meta | (heads.whole_meta(model.settings) if model.head == heads.DUAL_TOWERS else {})


def _generation(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of generation, which older checkpoints have in their config.json."""
    return {**config, **read_json(folder / GENERATION, absent_ok=True)}


def _decoder_start_ids(generation: Mapping[str, Any]) -> list[int]:
    """Return the tokens with which the decoder of an encoder-decoder begins, a forced first one among them."""
    start = generation.get("decoder_start_token_id")
    named = (
        generation.get("bos_token_id") if start is None else start,
        generation.get("forced_bos_token_id"),
    )
    return [token for token in named if isinstance(token, int)]


def _image_decoder(model: FolderModel) -> dict[str, Any]:
    """Return how the decoder of a model of images begins with a prompt, and the tokens that end its text.

    The latter only where the checkpoint's generation settings lack them or the family has others.
    """
    own = _generation(read_json(model.folder / "config.json"), model.folder)
    meta = own_prompts(model.name, model.settings)
    end = None if own.get("eos_token_id") is not None else decoder_config(model.settings).eos_token_id
    end = own_tokens(model.name, model.settings).get("eos_token_id", end)
    return meta if end is None else {**meta, "end_ids": end if isinstance(end, list) else [end]}


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the tokens that answers of masked language models and CTC need, as tokenizer_config.json names them."""
    config, tokens = read_json(folder / "tokenizer_config.json", absent_ok=True), dict[str, str]()
    for name, key in (("mask_token", "mask_token"), ("word_delimiter", "word_delimiter_token")):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens
