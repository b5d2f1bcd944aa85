"""Several models on one port: model folders, version changes under load, memory budgets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.errors import NotFoundError, ResourceError
from infer.serve.model_admin import ModelAdmin, check_memory
from infer.serve.model_repository import ModelRepository
from infer.serve.service import Service
from infer.serve.workers.shared_memory import SharedBufferPool
from tests.support.fake_predictors import double
from tests.support.worker_models import body_of, children, serving, wait_until


def put(folder: Path, **manifest: Any) -> Path:
    """Something that looks like an artifact, all at once."""
    work = folder.with_name(f".{folder.name}.tmp")
    work.mkdir(parents=True)
    (work / "manifest.json").write_text(json.dumps(manifest))
    work.rename(folder)
    return folder


def found(repository: ModelRepository) -> list[tuple[str, str, str]]:
    return [(name, version, one.path.name) for name, version, one in repository.all()]


def test_artifacts_version_folders_and_model_folders_are_found(tmp_path: Path) -> None:
    put(tmp_path / "models/a.infer", name="a", version="4")
    for version in ("1", "2", "10", "010", "x"):
        put(tmp_path / "models/b" / version, name="other", version="1")
    put(tmp_path / "models/.c.infer.tmp-1", name="c")
    (tmp_path / "models/empty").mkdir()
    everything = [("a", "4", "a.infer"), ("b", "1", "1"), ("b", "2", "2"), ("b", "10", "10")]
    assert found(ModelRepository([tmp_path / "models"])) == everything
    assert found(ModelRepository([tmp_path / "models/b"])) == everything[1:]
    assert found(ModelRepository([tmp_path / "models/a.infer"])) == everything[:1]
    latest = ModelRepository([tmp_path / "models", tmp_path / "nowhere"]).latest()
    assert [one.path.name for one in latest] == ["a.infer", "10", "nowhere"]
    with pytest.raises(NotFoundError):
        ModelRepository([tmp_path / "models"]).find("../b")


def test_model_beyond_free_memory_is_refused_with_figures(tmp_path: Path) -> None:
    folder = put(tmp_path / "a.infer", name="a")
    check_memory(folder, "a", 1, 1 << 30, None)
    need = "a needs about 0.59 GiB of memory .0.00 GiB of files, 0.59 GiB for 2 processes"
    sentence = f"{need}., 0.12 GiB are left of the 0.12 GiB"
    with pytest.raises(ResourceError, match=sentence):
        check_memory(folder, "a", 2, 1 << 27, None)


def test_kv_cache_counts_toward_the_memory_budget(tmp_path: Path) -> None:
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 64, "max_positions": 512, "kv_dtype": "float16"}
    folder = put(tmp_path / "a.infer", name="a", device="cpu", meta={"generation": shape})
    need, cache = check_memory(folder, "a", 1, 1 << 30, None)
    left = (1 << 30) - (need - cache)
    assert cache == min(left // 4, 65536 * 2 * 2 * 2 * 64 * 2)
    assert check_memory(folder, "a", 1, None, None)[1] is None  # the engine's own share of what is free
    need, cache = check_memory(folder, "a", 1, 1 << 30, None, kv_memory=1 << 28)
    assert cache == 1 << 28
    assert need > 1 << 28
    with pytest.raises(ResourceError, match="1.00 GiB for its KV cache"):
        check_memory(folder, "a", 1, 1 << 30, None, kv_memory=1 << 30)
    with pytest.raises(ResourceError, match="0.10 GiB are left of the 1.00 GiB"):
        check_memory(
            folder, "a", 1, 1 << 30, None, taken=(1 << 30) - (1 << 27) + (1 << 24) + (1 << 22) + (1 << 20)
        )
    plain = put(tmp_path / "b.infer", name="b")
    assert check_memory(plain, "b", 1, 1 << 30, None)[1] is None


def test_load_and_unload_routes_need_allow_reload(tmp_path: Path) -> None:
    put(tmp_path / "m/1", factor=2)
    with serving(opener="multiplies", path=str(tmp_path)) as (_, url):
        for path in ("index", "models/m/load", "models/m/unload"):
            assert httpx.post(f"{url}/v2/repository/{path}").status_code == 404


def test_version_change_under_load_drops_no_request(tmp_path: Path) -> None:
    put(tmp_path / "m/1", factor=1)
    answers: list[tuple[int, float]] = []

    async def client(url: str, over: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            while not over.is_set():
                answer = await http.post("/v2/models/m/infer", json=body_of(1))
                answers.append((answer.status_code, answer.json()["outputs"][0]["data"][0]))

    async def story(url: str) -> None:
        over = asyncio.Event()
        clients = [asyncio.create_task(client(url, over)) for _ in range(4)]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for version in (2, 3):
                put(tmp_path / f"m/{version}", factor=version)
                loaded = await http.post("/v2/repository/models/m/load")
                assert loaded.status_code == 200, loaded.text
                answer = await http.post("/v2/models/m/infer", json=body_of(1))
                assert (answer.json()["model_version"], answer.json()["outputs"][0]["data"][0]) == (
                    str(version),
                    version,
                )
                assert (await http.get(f"/v2/models/m/versions/{version}/ready")).status_code == 200
                assert (await http.get("/v2/models/m/versions/1")).status_code == 404
        over.set()
        await asyncio.gather(*clients)

    with serving(opener="multiplies", path=str(tmp_path), run={"allow_reload": True}) as (running, url):
        asyncio.run(story(url))
        assert {status for status, _ in answers} == {200}
        values = [value for _, value in answers]
        assert set(values) == {1.0, 2.0, 3.0}
        wait_until(lambda: len(children(running.pid)) == 1)
        gauge = 'infer_requests_running{model="m",version="%s"}'
        wait_until(lambda: gauge % 2 not in httpx.get(f"{url}/metrics").text)
        text = httpx.get(f"{url}/metrics").text
        assert gauge % 1 not in text
        assert gauge % 3 in text


@pytest.mark.parametrize("change", ["load", "unload"])
def test_a_change_ends_whose_client_leaves_before(tmp_path: Path, change: str) -> None:
    put(tmp_path / "m/1", factor=1)
    with serving(opener="multiplies", path=str(tmp_path), run={"allow_reload": True}) as (running, url):
        put(tmp_path / "m/2", factor=2)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v2/repository/models/m/{change}", timeout=httpx.Timeout(60, read=0.05))

        def states() -> list[tuple[str, str]]:
            listed = httpx.post(f"{url}/v2/repository/index").json()
            return [(one["version"], one["state"]) for one in listed]

        loaded = {"load": ["UNAVAILABLE", "READY"], "unload": ["UNAVAILABLE", "UNAVAILABLE"]}[change]
        wait_until(lambda: states() == list(zip("12", loaded, strict=True)))
        wait_until(lambda: len(children(running.pid)) == (change == "load"))


def test_replaced_models_are_let_go(tmp_path: Path) -> None:
    put(tmp_path / "m/1", factor=1)
    made: list[weakref.ref[Any]] = []

    async def reload() -> None:
        service = Service([double("m")])
        service.start()
        admin = ModelAdmin(service, ModelRepository([tmp_path]), Starting, linger=0.0)
        for _ in range(4):
            await admin.load("m")
            x = {"x": np.ones((1, 4), np.float32)}
            await service.engines["m"].infer(x, timeout=20)
        while sum(one() is not None for one in made) > 1:
            await asyncio.sleep(0.01)
        service.stop()

    class Starting:
        def __init__(self, found: Any) -> None:
            self.made = double("m")
            made.append(weakref.ref(self.made))

        def wait_ready(self) -> Any:
            return self.made

        def close(self) -> None:
            pass

    asyncio.run(asyncio.wait_for(reload(), 60))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
def test_a_closed_buffer_ends_with_the_last_answer_in_it() -> None:
    buffers = SharedBufferPool(2)
    files = {os.fstat(buffer.descriptor).st_ino for buffer in buffers.all}

    def left() -> int:
        count = 0
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the folder itself
                count += os.fstat(int(number)).st_ino in files
        return count

    buffer = buffers.lease()
    answer, _ = buffer.allocate((4,), np.float32)
    assert left() == 4
    buffers.close()
    answer[:] = 1
    assert left() == 1, "it is being read"
    del answer
    assert left() == 0


def test_failed_load_keeps_the_served_version_and_reports_why(tmp_path: Path) -> None:
    put(tmp_path / "m/1", factor=1)
    run = {"allow_reload": True, "memory": "4GiB"}
    with serving(opener="multiplies", path=str(tmp_path), run=run) as (running, url):
        put(tmp_path / "m/2", broken=True)
        refused = httpx.post(f"{url}/v2/repository/models/m/load", timeout=60)
        assert refused.status_code == 500
        assert "weights are damaged" in refused.json()["error"]
        listed = httpx.post(f"{url}/v2/repository/index").json()
        assert [(one["version"], one["state"]) for one in listed] == [("1", "READY"), ("2", "UNAVAILABLE")]
        assert "weights are damaged" in listed[1]["reason"]
        big = put(tmp_path / "m/3", factor=3)
        with (big / "weights").open("wb") as file:
            file.truncate(5 << 30)
        refused = httpx.post(f"{url}/v2/repository/models/m/load", timeout=60)
        assert refused.status_code == 503
        assert "m needs about 5.29 GiB of memory (5.00 GiB of files" in refused.json()["error"]
        answer = httpx.post(f"{url}/v2/models/m/infer", json=body_of(1), timeout=60)
        assert answer.json()["outputs"][0]["data"][0] == 1
        assert httpx.get(f"{url}/ready").status_code == 200
        assert len(children(running.pid)) == 1


def test_only_repository_models_load_and_unload(tmp_path: Path) -> None:
    put(tmp_path / "in/m/1", factor=1)
    put(tmp_path / "in/n/1", factor=5)
    put(tmp_path / "out/1", factor=9)
    with serving(opener="multiplies", path=str(tmp_path / "in"), run={"allow_reload": True}) as (
        running,
        url,
    ):
        repository = f"{url}/v2/repository"
        for name in ("out", "..%2fout", "%2e%2e%2fout", str(tmp_path / "out").replace("/", "%2f")):
            assert httpx.post(f"{repository}/models/{name}/load").status_code == 404
        given = {"parameters": {"config": "{}"}}
        assert httpx.post(f"{repository}/models/m/load", json=given).status_code == 400
        assert httpx.post(f"{repository}/models/m/unload", timeout=60).status_code == 200
        assert httpx.post(f"{url}/v2/models/m/infer", json=body_of(1)).status_code == 404
        assert httpx.post(f"{repository}/models/m/unload").status_code == 404
        wait_until(lambda: len(children(running.pid)) == 1)
        states = httpx.post(f"{repository}/index").json()
        assert {one["name"]: one["state"] for one in states} == {"m": "UNAVAILABLE", "n": "READY"}
        assert [one["name"] for one in httpx.post(f"{repository}/index", json={"ready": True}).json()] == [
            "n"
        ]
        shutil.rmtree(tmp_path / "in/n")
        assert httpx.post(f"{url}/v2/models/n/infer", json=body_of(1)).status_code == 200
        assert httpx.post(f"{repository}/models/m/load", timeout=60).status_code == 200
        assert httpx.post(f"{url}/v2/models/m/infer", json=body_of(1), timeout=60).status_code == 200
        assert httpx.get(f"{url}/openapi.json").status_code == 200
        running.terminate()
        assert running.wait(20) == 0
