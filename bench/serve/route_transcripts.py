"""Requests and answers of each route for texts and sound, by its usual client, against `infer serve` on tiny models.

    python -m bench.serve.route_transcripts

Makes random models of transformers (BERT with four heads, T5 and Whisper for ONNX Runtime), serves them on one port and
prints what openai, huggingface_hub's InferenceClient, and the JSON of Cohere, Jina, vLLM and TEI by httpx ask and get.
Answers of random weights mean nothing; names, shapes and status codes are what is shown. Any error ends it.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench.serve.client_tools import serving
from bench.serve.reporting import progress, write_results
from bench.serve.route_models import make_all, speech

LONGEST = 1400  # characters of an answer that are kept


def main() -> int:
    """Serve the models, ask every route, and write the transcript."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        made = make_all(Path(folder), progress)
        url = ready(stack, [*made.values()])
        client = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        found = [*by_openai(url, speech()), *by_json(client)]
        stack.close()
        found += by_inference_client(made)
    text = "".join(
        f"### {title}\n\n```text\n{asked}\n```\n\n```text\n{answer[:LONGEST]}\n```\n\n"
        for title, asked, answer in found
    )
    write_results("serve-routes", {"routes": [[title, asked] for title, asked, _ in found]}, text)
    return 0


def shown(value: Any) -> str:
    """Return JSON with vectors cut to four numbers."""
    return json.dumps(_short(value), indent=1, ensure_ascii=False)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list) and len(value) > 6 and all(isinstance(one, float) for one in value):
        return [*[round(one, 4) for one in value[:4]], f"… {len(value)} numbers"]
    if isinstance(value, list):
        return [_short(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value


def by_openai(url: str, sound: bytes) -> list[tuple[str, str, str]]:
    """Ask embeddings, completions of an encoder-decoder, and transcriptions by openai's client."""
    import openai

    found = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer: Any = client.embeddings.create(model="embedder", input=["a cat", "a dog"])
        asked = 'client.embeddings.create(model="embedder", input=["a cat", "a dog"])'
        found.append(("openai: /v1/embeddings", asked, shown(answer.model_dump())))
        answer = client.completions.create(
            model="t5-ort", prompt="translate: a cat", max_tokens=8, temperature=0
        )
        asked = 'client.completions.create(model="t5-ort", prompt="translate: a cat", max_tokens=8, temperature=0)'
        found.append(("openai: /v1/completions of T5 in ONNX Runtime", asked, shown(answer.model_dump())))
        for form in ("verbose_json", "srt"):
            answer = client.audio.transcriptions.create(
                model="whisper-ort", file=("talk.wav", sound), response_format=form
            )  # type: ignore[call-overload]
            asked = (
                f'client.audio.transcriptions.create(model="whisper-ort", file=…, response_format="{form}")'
            )
            said = answer if isinstance(answer, str) else shown(answer.model_dump())
            found.append((f"openai: /v1/audio/transcriptions, {form}, Whisper in ONNX Runtime", asked, said))
    return found


QUERY, DOCUMENTS = "where do cats sleep", ["cats sleep in the sun", "dogs bark", "a cat is an animal"]
JSON_REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Cohere", "/v2/rerank", {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}),
    (
        "Jina",
        "/v1/rerank",
        {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "return_documents": True},
    ),
    ("TEI", "/rerank", {"model": "ranker", "query": QUERY, "texts": DOCUMENTS, "raw_scores": True}),
    ("vLLM", "/score", {"model": "ranker", "text_1": QUERY, "text_2": DOCUMENTS}),
    ("vLLM", "/classify", {"model": "moods", "input": ["what a day", "rain again"]}),
    ("TEI", "/predict", {"model": "moods", "inputs": [["what a day"], ["rain", "again"]]}),
    ("TEI, an error", "/predict", {"model": "moods", "inputs": []}),
)


def by_json(client: httpx.Client) -> list[tuple[str, str, str]]:
    """Ask rerank, score, classify and predict in the JSON of the services whose names they have."""
    found = []
    for whose, path, body in JSON_REQUESTS:
        answer = client.post(path, json=body)
        asked = f'httpx.post("{path}", json={json.dumps(body)})'
        found.append((f"{whose}: {path}", asked, f"{answer.status_code}\n{shown(answer.json())}"))
    return found


ALONE = {"filler": ("fill_mask", "a [MASK] on the mat"), "moods": ("text_classification", "what a day")}


def by_inference_client(made: dict[str, Path]) -> list[tuple[str, str, str]]:
    """Ask /predict by huggingface_hub's client, which names no model: each is served alone, as TEI serves one."""
    import huggingface_hub
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False  # the server is on this machine
    found = []
    for name, (task, text) in ALONE.items():
        with ExitStack() as stack:
            url = ready(stack, [made[name]])
            client = huggingface_hub.InferenceClient(model=f"{url}/predict", timeout=300)
            answer = getattr(client, task)(text)
        asked = f'InferenceClient(model=f"{{url}}/predict").{task}({text!r})'
        found.append((f"huggingface_hub: {task}", asked, shown(_plain(answer))))
    return found


def _plain(answer: Any) -> Any:
    """Return the client's objects as JSON has them, the first three of a list."""
    return (
        [dataclasses.asdict(one) for one in answer[:3]]
        if isinstance(answer, list)
        else dataclasses.asdict(answer)
    )


def ready(stack: ExitStack, made: Sequence[Path]) -> str:
    """Start a server of artifacts and return its URL when it is ready."""
    progress(f"serving {', '.join(path.stem for path in made)}")
    url = f"http://{serving(stack, [str(path) for path in made])}"
    for _ in range(600):
        if httpx.get(f"{url}/ready", timeout=60).status_code == 200:
            return url
        time.sleep(0.5)
    raise SystemExit("the server was not ready in five minutes")


if __name__ == "__main__":
    raise SystemExit(main())
