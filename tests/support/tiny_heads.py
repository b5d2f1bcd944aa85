"""Tiny random models of transformers with a head, as folders with a tokenizer of few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = "the cat sat on a mat who is where dog ran far away and it was not there at all".split()  # noqa: SIM905
TEXTS = [
    "the cat sat on a mat",
    "a dog ran far away and it was not there",
    "who is it",
    "where is the dog at all",
]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}


def save_tokenizer(folder: Path) -> int:
    """Save a WordPiece tokenizer like BERT's; return the size of its vocabulary."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(
        models.WordPiece({t: i for i, t in enumerate([*special, *WORDS])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    names = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    named = {f"{name}_token": special[i] for name, i in names.items()}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained(folder)
    return len(special) + len(WORDS)


def save(model: Any, folder: Path, seed: int = 0) -> Any:
    """Save a model whose random weights are scaled so that its outputs vary."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.2 / max(1, parameter[0].numel()) ** 0.5)
    model.eval().save_pretrained(folder)
    return model


def bert(folder: Path, kind: str, **changes: Any) -> Any:
    """Save a BERT with a head, and its tokenizer."""
    import transformers

    vocabulary = save_tokenizer(folder)
    config = transformers.BertConfig(**SMALL, vocab_size=vocabulary, max_position_embeddings=64, **changes)
    return save(getattr(transformers, f"BertFor{kind}")(config), folder)
