"""Answers with places in a text: entities, spans that answer a question, tokens of a mask, ready for JSON.

Each takes the outputs of texts as NumPy arrays, and encodings: objects with the fields of `tokenizers.Encoding`. It
gives what transformers' pipeline of the task gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from .answers import TOP, Answer, name_of, softmax
from .steps import Compute, Decode, EncodeSpans, FindTokens, RunRows, Steps
from .text_model import TextModel, run_texts

LONGEST_SPAN = 15  # tokens of an answer to a question
OUTSIDE = ("O",)  # labels of tokens that belong to no entity
ROWS_AT_ONCE = 8  # of texts with masks, whose logits have the whole vocabulary for each token


def tag(
    model: TextModel,
    texts: Sequence[str],
    where: str,
    *,
    aggregated: bool = True,
    ignored: Collection[str] = OUTSIDE,
) -> Steps[list[list[Answer]]]:
    """Return the `entities` of each text, or unless `aggregated` its `token_labels`."""
    encodings = yield EncodeSpans(model.lower(texts), None, where)
    logits = (yield _run(encodings, "logits"))["logits"]
    if not aggregated:
        return [
            token_labels(row, one, model.labels, ignored=ignored)
            for row, one in zip(logits, encodings, strict=True)
        ]
    triples = zip(logits, encodings, texts, strict=True)
    return [entities(row, one, text, model.labels, ignored=ignored) for row, one, text in triples]


def answer_question(
    model: TextModel,
    question: str,
    context: str,
    where: str,
    *,
    top: int = 1,
    longest: int = LONGEST_SPAN,
) -> Steps[list[Answer]]:
    """Return the `best_spans` of a context of any length, which runs in windows."""
    asked, read = model.lower([question, context])
    windows = yield EncodeSpans([read], asked, where)
    outputs = yield _run(windows, "start_logits", "end_logits")
    pairs = zip(outputs["start_logits"], outputs["end_logits"], windows, strict=True)
    return best_spans(list(pairs), context, top=top, longest=longest)


def fill_masks(
    model: TextModel,
    texts: Sequence[str],
    where: str,
    *,
    top: int = TOP,
    targets: Sequence[str] | None = None,
    most_tokens: int | None = None,
) -> Steps[list[list[list[Answer]]]]:
    """Return the best tokens of each mask of each text; with `targets` the best of these.

    Raises `InputError` for a text without a mask, a target that is no token, and filled texts of more than
    `most_tokens` together.
    """
    token = str(model.meta.get("mask_token", "[MASK]"))
    mask_id, *known = yield FindTokens([token, *(targets or ())])
    if None in known:
        raise InputError(
            "expected a token of the vocabulary",
            where=f"parameters.targets[{known.index(None)}]",
            hint="It is spelled as in the model's tokenizer.json",
        )
    read = [token.join(model.lower(text.split(token))) for text in texts]
    encodings = yield EncodeSpans(read, None, where)
    masks = [one.ids.count(mask_id) for one in encodings]
    if 0 in masks:
        raise InputError(f"expected a text with {token} in it", where=f"{where}[{masks.index(0)}]")
    size = sum(top * count * len(one.ids) for one, count in zip(encodings, masks, strict=True))
    if most_tokens is not None and size > most_tokens:
        raise InputError(
            f"the filled texts have {size} tokens, at most are {most_tokens}", where="parameters.top_k"
        )
    options = {"top": top, "targets": None if targets is None else known, "pad_id": model.meta.get("pad_id")}
    filled: list[list[list[FilledMask]]] = []
    for start in range(0, len(encodings), ROWS_AT_ONCE):
        part = encodings[start : start + ROWS_AT_ONCE]
        logits = (yield _run(part, "logits"))["logits"]
        filled += yield Compute(_filled, (logits, [one.ids for one in part], mask_id, options))
    each = [one for text in filled for mask in text for one in mask]
    said = iter((yield Decode([row for one in each for row in (([one.token], False), (one.ids, one.alone))])))
    return [[[one.answer(next(said), next(said)) for one in mask] for mask in text] for text in filled]


def _filled(
    logits: Sequence[np.ndarray], rows: Sequence[Sequence[int]], mask_id: int, options: Mapping[str, Any]
) -> list[list[list[FilledMask]]]:
    return [filled_masks(one, ids, mask_id, **options) for one, ids in zip(logits, rows, strict=True)]


def choose(
    model: TextModel, question: str, choices: Sequence[str], where: str, *, raw: bool = False
) -> Steps[list[Answer]]:
    """Return the `choice_scores` of a question."""
    scores = yield from run_texts(model, [(question, choice) for choice in choices], where)
    return choice_scores(scores, choices, raw=raw)


def _run(encodings: Sequence[Any], *outputs: str) -> RunRows:
    return RunRows([one.ids for one in encodings], outputs, [one.type_ids for one in encodings])


def entities(
    logits: np.ndarray,
    encoding: Any,
    text: str,
    labels: Sequence[str],
    *,
    ignored: Collection[str] = OUTSIDE,
) -> list[Answer]:
    """Return entities of a text from logits [tokens, labels]: neighbours of one type are one entity.

    B-TYPE begins an entity, I-TYPE continues it; the score is the mean of its tokens. Labels that are `ignored` are no
    entities. This is the aggregation that transformers calls "simple".
    """
    scores = softmax(logits)
    found: list[Answer] = []
    previous = ""
    for index, (start, end) in enumerate(encoding.offsets[: len(scores)]):
        if encoding.special_tokens_mask[index]:
            continue
        best = int(scores[index].argmax())
        label = name_of(labels, best)
        prefix, _, kind = label.partition("-") if label[:2] in ("B-", "I-") else ("I", "", label)
        if label not in ignored:
            if found and kind == previous and prefix != "B":
                found[-1]["end"] = end
                found[-1]["scores"].append(float(scores[index, best]))
            else:
                found.append(
                    {"entity_group": kind, "scores": [float(scores[index, best])], "start": start, "end": end}
                )
        previous = "" if label in ignored else kind
    return [_entity(one, text) for one in found]


def _entity(found: Answer, text: str) -> Answer:
    score, start, end = float(np.mean(found["scores"])), found["start"], found["end"]
    return {
        "entity_group": found["entity_group"],
        "score": score,
        "word": text[start:end],
        "start": start,
        "end": end,
    }


def token_labels(
    logits: np.ndarray, encoding: Any, labels: Sequence[str], *, ignored: Collection[str] = OUTSIDE
) -> list[Answer]:
    """Return the label of each token of a text from logits [tokens, labels], without aggregation."""
    scores, found = softmax(logits), []
    for index, (start, end) in enumerate(encoding.offsets[: len(scores)]):
        best = int(scores[index].argmax())
        if encoding.special_tokens_mask[index] or name_of(labels, best) in ignored:
            continue
        found.append(
            {
                "entity": name_of(labels, best),
                "score": float(scores[index, best]),
                "index": index,
                "word": encoding.tokens[index],
                "start": start,
                "end": end,
            }
        )
    return found


def best_spans(
    windows: Sequence[tuple[np.ndarray, np.ndarray, Any]],
    context: str,
    *,
    top: int = 1,
    longest: int = LONGEST_SPAN,
) -> list[Answer]:
    """Return the most probable answers in a context, of at most `longest` tokens, best first.

    `windows` are start logits [tokens], end logits [tokens] and the encoding of each piece of the context. A score is
    the product of the probabilities of first and last token, among the tokens of that piece; of a span that two pieces
    have the better one counts. One answer without text where no piece has any token.
    """
    scores: dict[tuple[int, int], float] = {}
    for start_logits, end_logits, encoding in windows:
        places = [i for i, kind in enumerate(encoding.sequence_ids) if kind == 1]
        if not places:
            continue
        first, last = (softmax(logits[places]) for logits in (start_logits, end_logits))
        pairs = np.triu(np.outer(first, last))
        pairs -= np.triu(pairs, longest)
        order = np.argsort(-pairs, axis=None, kind="stable")[:top] if top > 1 else [int(pairs.argmax())]
        for begin, end in (divmod(int(one), len(places)) for one in order):
            if score := float(pairs[begin, end]):
                span = encoding.offsets[places[begin]][0], encoding.offsets[places[end]][1]
                scores[span] = max(score, scores.get(span, 0.0))
    ranked = sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:top] or [((0, 0), 0.0)]
    return [
        {"answer": context[start:end], "score": score, "start": start, "end": end}
        for (start, end), score in ranked
    ]


class FilledMask(NamedTuple):
    """A token in place of a mask: its probability, and the ids of the text with it.

    `alone`: no other mask is left in the text, so that its special tokens are not shown.
    """

    token: int
    score: float
    ids: list[int]
    alone: bool

    def answer(self, token_str: str, sequence: str) -> Answer:
        """Return the answer with the token and the text as the tokenizer decodes them."""
        return {
            "score": self.score,
            "token": self.token,
            "token_str": token_str.strip(),
            "sequence": sequence,
        }


def filled_masks(
    logits: np.ndarray,
    ids: Sequence[int],
    mask_id: int,
    *,
    top: int = TOP,
    targets: Sequence[int] | None = None,
    pad_id: int | None = None,
) -> list[list[FilledMask]]:
    """Return the most probable tokens of each mask in a text, best first, from logits [tokens, vocabulary].

    With `targets` only among those tokens; scores stay probabilities over the whole vocabulary. `pad_id` is left out of
    the filled texts.
    """
    places = [i for i, number in enumerate(ids) if number == mask_id]
    found = []
    for place in places:
        scores = softmax(logits[place])
        known = np.arange(len(scores)) if targets is None else np.array(sorted(set(targets)))
        order = known[np.argsort(-scores[known], kind="stable")[:top]]
        row = []
        for token in map(int, order):
            filled = [number for number in (*ids[:place], token, *ids[place + 1 :]) if number != pad_id]
            row.append(FilledMask(token, float(scores[token]), filled, alone=len(places) == 1))
        found.append(row)
    return found


def choice_scores(scores: np.ndarray, choices: Sequence[str], *, raw: bool = False) -> list[Answer]:
    """Return the choices of a question with their probabilities, best first, from scores [choices, 1].

    `raw` gives the scores themselves.
    """
    found = scores[:, 0] if raw else softmax(scores[:, 0])
    return [
        {"label": choices[i], "score": float(found[i])} for i in np.argsort(-found, kind="stable").tolist()
    ]
