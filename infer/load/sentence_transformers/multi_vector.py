"""Late-interaction models (ColBERT): a vector for each token, as sentence-transformers, PyLate and Stanford save them.

Queries and documents differ: by a marker token or a prompt, by their lengths, by tokens that are added to a query
(expansion) and by tokens of a document that are not compared (punctuation). See Khattab and Zaharia, ColBERT, 2020.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ..samples.confined_tokenizer import tokens_of

TASK = "multi-vector-embedding"
STANFORD = "HF_ColBERT"  # architecture of Stanford's checkpoints, whose projection lies beside the encoder
ROLES = ("query", "document")
LENGTH = 32  # tokens of a query where the folder does not say, as in ColBERT


@dataclass(frozen=True)
class MultiVector:
    """Settings of queries and documents.

    `markers`: role → text of the token that was inserted in training; `lengths`: role → tokens at most;
    `expansion`: {"length", "attend", "strategy", "token"}; `skipped`: words that are not compared in texts of the
    roles `skipped_in`; `mean`: scores are divided by the tokens of the query; `inline`: the projection lies in the
    checkpoint of the encoder.
    """

    markers: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    expansion: Mapping[str, Any] | None = None
    skipped: Sequence[str] = ()
    skipped_in: Sequence[str] = ("document",)
    mean: bool = False
    inline: bool = False

    @property
    def hides_expansion(self) -> bool:
        """True where tokens of the expansion are compared, but no other token attends to them."""
        return self.expansion is not None and not self.expansion.get("attend")

    def meta(self, tokenizer_file: Path, prompts: Mapping[str, str]) -> dict[str, Any]:
        """Return what the runtime needs, with token ids of `tokenizer_file`, as JSON.

        Raises `SourceError` without that file or the token that expands queries.
        """
        tokenizer = _opened(tokenizer_file)
        vocabulary = tokenizer.token_to_id
        found: dict[str, Any] = {"lengths": dict(self.lengths), "skipped_in": list(self.skipped_in)}
        texts, ids = dict(prompts), {}
        for role, value in self.markers.items():
            rest = texts.get(role, "").removeprefix(value)
            known = (one for one in (value, *value.split()[:1]) if vocabulary(one) is not None)
            marker = next(known, "")
            texts[role] = value.removeprefix(marker) + rest
            if marker:
                ids[role] = vocabulary(marker)
        found |= {"markers": ids, "prompts": texts, "mean": self.mean}
        unknown = _unknown_token(tokenizer)
        skipped = {vocabulary(word) for word in self.skipped} - {None, unknown}
        found["skipped"] = sorted(number for number in skipped if number is not None)
        special = tokenizer.encode("a").special_tokens_mask
        found["tail"] = next((i for i, one in enumerate(reversed(special)) if not one), 0)
        found["head"] = next((i for i, one in enumerate(special) if not one), 0)
        if self.expansion is not None:
            found["expansion"] = self._expansion(vocabulary, tokenizer_file)
        return found

    def _expansion(self, vocabulary: Any, file: Path) -> dict[str, Any]:
        expansion = self.expansion or {}
        named = expansion.get("token") or next(
            (t for t in ("[MASK]", "<mask>") if vocabulary(t) is not None), ""
        )
        number = vocabulary(named)
        if number is None:
            raise SourceError(
                f"queries are expanded by the token {named or '[MASK]'}, which the tokenizer does not have",
                where=str(file),
            )
        return {
            "token": number,
            "length": int(expansion.get("length") or LENGTH),
            "attend": bool(expansion.get("attend")),
            "cut": expansion.get("strategy", "fixed") == "fixed",
        }


def read_multi_vector(
    folder: Path,
    said: Mapping[str, Any],
    limits: Mapping[str, Any],
    modules: Sequence[Any],
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> MultiVector | None:
    """Return the settings of a folder of a late-interaction model, None for other folders.

    `said`: config_sentence_transformers.json; `limits`: sentence_bert_config.json; `modules`: of modules.json;
    `config`: config.json; `metadata`: of Stanford's `artifact.metadata`.
    """
    if not modules and STANFORD in (config.get("architectures") or ()):
        return _stanford(metadata)
    kinds = [module.kind for module in modules]
    if said.get("model_type") == "ColBERT" or (modules and "query_prefix" in said):
        return _pylate(said)
    if said.get("model_type") != "MultiVectorEncoder" and "MultiVectorMask" not in kinds:
        return None
    mask: Mapping[str, Any] = next(
        (module.config for module in modules if module.kind == "MultiVectorMask"), {}
    )
    if mask.get("keep_only_token_ids"):
        raise SourceError(
            "the folder compares tokens of images only (ColPali), not of texts", where=str(folder)
        )
    named = {"query": limits.get("query_length"), "document": limits.get("document_length")}
    return MultiVector(
        lengths={role: int(length) for role, length in named.items() if length},
        expansion=limits.get("query_expansion"),
        skipped=tuple(mask.get("skiplist_words") or ()),
        skipped_in=tuple(mask.get("skiplist_tasks") or ("document",)),
        mean=said.get("similarity_fn_name") == "meanmaxsim",
    )


def _pylate(said: Mapping[str, Any]) -> MultiVector:
    expansion = said.get("query_expansion")
    if "query_expansion" not in said and said.get("do_query_expansion") is not False:
        attend = said.get("attend_to_expansion_tokens", said.get("attend_to_mask_tokens"))
        expansion = {"length": said.get("query_length") or LENGTH, "attend": bool(attend)}
    named = {"query": said.get("query_length"), "document": said.get("document_length")}
    words = said.get("skiplist_words")
    return MultiVector(
        markers={role: str(said.get(f"{role}_prefix") or "") for role in ROLES if said.get(f"{role}_prefix")},
        lengths={role: int(length) for role, length in named.items() if length},
        expansion=expansion,
        skipped=tuple(string.punctuation if words is None else words),
        mean=said.get("similarity_fn_name") == "meanmaxsim",
    )


def _stanford(metadata: Mapping[str, Any]) -> MultiVector:
    marks = {
        "query": metadata.get("query_token_id") or "[unused0]",
        "document": metadata.get("doc_token_id") or "[unused1]",
    }
    length = int(metadata.get("query_maxlen") or LENGTH)
    longest = metadata.get("doc_maxlen")
    return MultiVector(
        markers={role: f"{mark} " for role, mark in marks.items()},
        lengths={"query": length, **({"document": int(longest)} if longest else {})},
        expansion={"length": length, "attend": bool(metadata.get("attend_to_mask_tokens"))},
        skipped=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
        inline=True,
    )


def _opened(path: Path) -> Any:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise SourceError("expected the tokenizer.json of a late-interaction model", where=str(path.parent))
    tokens_of(path, ["a"], None)  # within limits, before it runs in this process
    found = Tokenizer.from_file(str(path))
    found.no_padding()
    found.no_truncation()
    return found


def _unknown_token(tokenizer: Any) -> int | None:
    token = getattr(tokenizer.model, "unk_token", None)
    found: int | None = tokenizer.token_to_id(token) if token else None
    return found
