"""Pre-tokenizers of byte-level vocabularies by their name in a GGUF file (tokenizer.ggml.pre).

A text is split by each pattern in turn, matches apart from what is between them; the patterns are those of the original
tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{one}{_LOWER}{two}" for one, two in (("*", "+"), ("+", "*")))
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _SLASHES
_GPT4O = "|".join(f"{one}{_CONTRACTIONS}?" for one in _CASED) + r"|\p{N}{1,3}" + _SLASHES
_SEED = _CONTRACTIONS + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES
_BAILING = r"'(?i:[sdmt]|ll|ve|re)" + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _LINES
)
_IDEOGRAPHS = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_OLD_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SENTENCES = " ?[^(\\s|.,!?…。，、।۔،)]+"
_DIGITS = (r"\p{N}", _GPT2)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns that split a text one after the other.

    `keeps_words`: words of the vocabulary are tokens without merges, and texts begin with BOS by default; `composes`:
    texts are put in normal form C first.
    """

    patterns: tuple[str, ...]
    keeps_words: bool = False
    composes: bool = False

    def build(self) -> Any:
        """Return the pre-tokenizer of `tokenizers`."""
        from tokenizers import Regex, pre_tokenizers

        steps = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in self.patterns]
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


def _named(
    names: str, *patterns: str, keeps_words: bool = False, composes: bool = False
) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(patterns, keeps_words, composes))


PRE_TOKENIZERS = {
    **_named("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum modern-bert", _GPT2),
    **_named("smollm starcoder refact command-r codeshell minerva-7b exaone", *_DIGITS),
    **_named("llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, keeps_words=True),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
    **_named("qwen2 deepseek-r1-qwen", _QWEN2, composes=True),
    **_named("stablelm2 hunyuan megrez", _QWEN2),
    **_named("tekken", _TEKKEN, keeps_words=True),
    **_named("qwen35", _QWEN35, composes=True),
    **_named("gpt-4o llama4", _GPT4O),
    **_named("seed-coder", _SEED),
    **_named("bailingmoe bailingmoe2 llada-moe", _BAILING),
    **_named("deepseek-v3 hunyuan-dense", r"\p{N}{1,3}", _IDEOGRAPHS, _DEEPSEEK3),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_IDEOGRAPHS, r"\p{N}"),
    **_named("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **_named("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named("poro-chat bloom gpt3-finnish", _SENTENCES),
    **_named("viking", _SENTENCES, r"\p{N}"),
}
