"""The page at / in a real browser: content, interaction and accessibility."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.serve.api import ops
from infer.spec import TensorSpec
from tests.support import chromium, fake_media
from tests.support.chromium import Tab
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import Fake, Live, classifier, double, embedder, live

ROOT = Path(__file__).resolve().parents[2]
HTML = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
needs_browser = pytest.mark.skipif(
    chromium.found() is None, reason="no Chromium here: apt-get install chromium"
)


def brightest() -> Fake:
    """Ten classes of an 8x8 image; the class is the column of the brightest pixels."""

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        columns = inputs["image"].sum((1, 2))
        return {"logits": np.concatenate([columns, np.zeros((len(columns), 2), np.float32)], 1)}

    inputs = (TensorSpec("image", "float32", ("batch", 1, 8, 8)),)
    outputs = (TensorSpec("logits", "float32", ("batch", 10)),)
    return Fake("brightest", inputs, outputs, run, task="classification")


@pytest.fixture(scope="module")
def fake_llm(tmp_path_factory: pytest.TempPathFactory) -> FakeEngine:
    return FakeEngine(0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fake_llm: FakeEngine) -> Iterator[Live]:
    told = FakeLLMPredictor(tmp_path_factory.mktemp("fake_llm"), engine=fake_llm, context=4096)
    with live(double(), brightest(), embedder(), told) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with chromium.browser() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, server: Live) -> Iterator[Tab]:
    """Open the page anew; an error on its console fails the test."""
    browser.leave()
    browser.show(1280)
    browser.go(f"{server.url}/?{time.monotonic()}")
    browser.until("document.querySelectorAll('[role=tab]').length === 4")
    yield browser
    assert browser.errors == []
    assert [url for url in browser.asked if not url.startswith((server.url, "data:", "blob:"))] == []


def choose(tab: Tab, name: str) -> str:
    """Return the selector of a model's panel."""
    tab.run(f"document.getElementById('tab-{name}').click()")
    return f"#panel-{name}"


def test_browsers_get_html_other_clients_json(server: Live) -> None:
    got = httpx.get(server.url, headers=HTML)
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert got.headers["vary"] == "accept"
    for accept in ("*/*", "application/json"):
        assert httpx.get(server.url, headers={"Accept": accept}).json()["name"] == "infer"


def test_content_security_policy_blocks_external_resources(server: Live) -> None:
    for path in ("/", "/page/app.js", "/page/style.css", "/page/icon.svg"):
        headers = httpx.get(f"{server.url}{path}", headers=HTML).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_page_has_no_external_urls_or_inline_scripts() -> None:
    for name, content in ops.page_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.M), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
    index = ops.page_files()["index.html"].decode()
    assert not re.search(r"<script(?![^>]* src=)|<style| on\w+=| style=", index)


def test_every_file_of_the_page_is_packaged() -> None:
    wanted = re.search(r'"infer\.serve\.page" = \[(.*)\]', (ROOT / "pyproject.toml").read_text())
    assert wanted
    endings = re.findall(r"\*(\.\w+)", wanted[1])
    here = [
        f.name for f in (resources.files("infer.serve") / "page").iterdir() if not f.name.startswith("__")
    ]
    assert here
    assert all(name.endswith(tuple(endings)) for name in here)
    assert set(here) == set(ops.page_files())


@pytest.mark.parametrize(
    "name", ["nope.js", "..%2f__init__.py", "%2e%2e%2fserver.py", "__init__.py", "app.js%00", ""]
)
def test_only_page_files_are_served(server: Live, name: str) -> None:
    assert httpx.get(f"{server.url}/page/{name}").status_code == 404


def test_api_key_protects_page_data_not_the_page() -> None:
    with live(double(), api_key="s3cret") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/", headers=HTML).status_code == 200
        assert client.get("/page/app.js").status_code == 200
        for path in ("/", "/ops/models", "/ops/now", "/ops/models/double/example"):
            assert client.get(path).status_code == 401


@needs_browser
def test_every_model_has_a_tab_with_arrow_key_navigation(tab: Tab) -> None:
    assert tab.run("document.querySelector('[role=tab][aria-selected=true]').textContent").startswith(
        "double"
    )
    tab.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for key, name in (("ArrowRight", "brightest"), ("ArrowLeft", "double"), ("ArrowLeft", "fake_llm")):
        tab.press(key)
        assert tab.run("document.activeElement.id") == f"tab-{name}"
        assert tab.run("document.querySelectorAll('[role=tabpanel]:not([hidden])').length") == 1
    assert tab.run("location.hash") == "#fake_llm"


@needs_browser
def test_json_tensor_input_shows_an_output_table(tab: Tab) -> None:
    panel = choose(tab, "double")
    tab.run(f"document.querySelector('{panel} textarea').value = ''")
    tab.run(f"document.querySelector('{panel} textarea').focus()")
    tab.type("[[1, 2, 3, 4.5]]")
    tab.run(f"document.querySelector('{panel} .primary').click()")
    tab.until(f"document.querySelector('{panel} .cells') !== null")
    cells = tab.run(
        f"[...document.querySelectorAll('{panel} .output:first-of-type .cells td')].map(c => c.textContent)"
    )
    assert cells[:4] == ["2", "4", "6", "9"]
    assert "in the model" in tab.run(f"document.querySelector('{panel} .timing').textContent")


@needs_browser
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("[[1, 2]]", "expected input 'x' float32 [batch, 4]"),
        ("[[1, 2], [3]]", "equally long"),
        ("[1,", "not JSON"),
        ('[["a"]]', "number"),
    ],
)
def test_wrong_tensor_shows_the_error_message(tab: Tab, typed: str, said: str) -> None:
    panel = choose(tab, "double")
    tab.run(f"document.querySelector('{panel} textarea').value = ''")
    tab.run(f"document.querySelector('{panel} textarea').focus()")
    tab.type(typed)
    tab.run(f"document.querySelector('{panel} .primary').click()")
    tab.until(f"document.querySelector('{panel} .result .error') !== null")
    assert said in tab.run(f"document.querySelector('{panel} .result .error').textContent")
    tab.errors[:] = [error for error in tab.errors if "status of 400" not in error]  # the browser's own note


@needs_browser
def test_drawing_is_classified_with_the_best_class_first(tab: Tab) -> None:
    panel = choose(tab, "brightest")
    box = tab.run(f"document.querySelector('{panel} .pad').getBoundingClientRect().toJSON()")
    x, y, size = box["x"], box["y"], box["width"]
    tab.drag([(x + 0.1 * size, y + 0.1 * size), (x + 0.9 * size, y + 0.12 * size)])
    tab.drag([(x + 0.85 * size, y + 0.1 * size), (x + 0.85 * size, y + 0.9 * size)])
    tab.run(f"document.querySelector('{panel} .primary').click()")
    best = tab.until(f"document.querySelector('{panel} .classes .best th')?.textContent")
    assert best in ("6", "7")


MEDIA = (fake_media.colors, fake_media.detector, fake_media.segmenter, fake_media.listener)


@pytest.fixture(scope="module")
def media_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("hearing")
    moods = classifier("moods", ["good", "bad"])
    with live(*(make() for make in MEDIA), fake_media.transcriber(folder), moods) as server:
        yield server


def choose_file(tab: Tab, panel: str, data: bytes, name: str) -> None:
    """Put a file into the panel's file input, and run the form."""
    text = base64.b64encode(data).decode()
    tab.run(
        f"""(async () => {{
          const bytes = Uint8Array.from(atob('{text}'), (c) => c.charCodeAt(0));
          const list = new DataTransfer();
          list.items.add(new File([bytes], '{name}'));
          const input = document.querySelector('{panel} input[type=file]');
          input.files = list.files;
          input.dispatchEvent(new Event('change'));
          await new Promise((done) => setTimeout(done, 200));
          document.querySelector('{panel} .primary').click();
        }})()"""
    )


@needs_browser
def test_requests_of_the_page_before_are_not_counted(browser: Tab, server: Live) -> None:
    for _ in range(5):
        browser.go(f"{server.url}/?{time.monotonic()}")
        browser.run("setInterval(() => fetch('/health?late').catch(() => 0), 1) && 1")
        browser.leave()
        browser.go(f"{server.url}/?{time.monotonic()}")
        browser.until("document.querySelectorAll('[role=tab]').length === 4")
        assert [url for url in browser.asked if "late" in url] == []


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_files_are_answered_by_labels_boxes_masks_and_text(
    browser: Tab, media_server: Live, width: int, tmp_path: Path
) -> None:
    browser.leave()
    browser.show(width)
    browser.go(f"{media_server.url}/?{time.monotonic()}")
    browser.until("document.querySelectorAll('[role=tab]').length === 6")
    halves = fake_media.two_colors((250, 10, 10), (10, 250, 10), (400, 200))
    spoken = fake_media.wav(fake_media.speech("ab cad bee"))
    for name, data, file, said in (
        ("colors", halves, "a.png", "red"),
        ("finder", halves, "a.png", "Objects, the surest first red 98.9 % green 98.9 %"),
        ("parts", halves, "a.png", "Classes, the largest first"),
        ("loudness", fake_media.wav(np.ones(400) * 0.9), "a.wav", "loud"),
        ("hearing", spoken, "a.wav", "ab cad bee"),
    ):
        panel = choose(browser, name)
        choose_file(browser, panel, data, file)
        got = browser.until(f"document.querySelector('{panel} .result:not([aria-busy])')?.innerText")
        assert said in " ".join(got.split()), got
        assert browser.run(f"document.querySelectorAll('{panel} :is(.picture, audio)').length") == 1
        assert browser.run("document.documentElement.scrollWidth") <= width, name
        assert browser.run(NAMELESS) == [], name
        browser.picture(tmp_path / f"{name}.png")
    panel = choose(browser, "moods")
    browser.run(f"document.querySelector('{panel} textarea').value = 'ggg'")
    browser.run(
        f"document.querySelector('{panel} input').value = 'bbb'; document.querySelector('{panel} .primary').click()"
    )
    assert "Label of each pair" in browser.until(f"document.querySelector('{panel} .result')?.innerText")
    assert browser.errors == []


@needs_browser
def test_texts_are_compared_by_cosine_similarity(tab: Tab) -> None:
    panel = choose(tab, "embedder")
    tab.run(f"document.querySelector('{panel} .primary').click()")
    tab.until(f"document.querySelectorAll('{panel} .cosines tbody tr').length === 3")
    assert tab.run(f"document.querySelector('{panel} .cosines td').textContent") == "1.00"


@needs_browser
def test_chat_streams_and_shows_its_speed(tab: Tab) -> None:
    panel = choose(tab, "fake_llm")
    tab.run(f"document.querySelector('{panel} [name=max_tokens]').value = '26'")
    tab.run(f"document.querySelector('{panel} .field textarea').focus()")
    tab.type("Say the alphabet")
    tab.press("Enter")
    tab.until(f"document.querySelector('{panel} .assistant .said')?.textContent.startsWith('ABC')")
    note = tab.until(f"document.querySelector('{panel} .assistant .note')?.textContent")
    assert re.fullmatch(
        r"26 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s · cut at the most tokens", note
    )
    assert (
        tab.run(f"document.querySelector('{panel} .assistant .said').textContent")
        == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    assert tab.run(f"document.querySelector('{panel} .log').getAttribute('aria-busy')") == "false"
    assert tab.run("document.activeElement.tagName") == "TEXTAREA"


@needs_browser
def test_stop_button_cancels_the_generation(tab: Tab, fake_llm: FakeEngine) -> None:
    panel = choose(tab, "fake_llm")
    tab.run(f"document.querySelector('{panel} [name=max_tokens]').value = '4000'")
    tab.run(f"document.querySelector('{panel} .field textarea').focus()")
    tab.type("Go on for ever")
    tab.press("Enter")
    tab.until(f"document.querySelector('{panel} .assistant .said')?.textContent.length > 5")
    before = len(fake_llm.cancelled)
    assert tab.run("document.activeElement.textContent") == "Stop"
    tab.press("Enter")
    assert tab.until(f"document.querySelector('{panel} .assistant .note')?.textContent").endswith("stopped")
    end = time.monotonic() + 10
    while len(fake_llm.cancelled) == before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(fake_llm.cancelled) == before + 1
    assert not fake_llm.jobs


@needs_browser
def test_plots_show_the_current_load(tab: Tab, server: Live) -> None:
    panel = choose(tab, "double")
    data = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1] * 8}]}
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            for _ in range(10):
                assert client.post("/v2/models/double/infer", json=data).status_code == 200
            time.sleep(0.5)
    tab.until(f"Number(document.querySelector('{panel} .tiles dd').textContent) > 1")
    labels = tab.run(
        f"[...document.querySelectorAll('{panel} .plot')].map(p => p.getAttribute('aria-label'))"
    )
    assert [label.split(",")[0] for label in labels] == ["Throughput", "Latency", "Queue", "Batch size"]
    assert re.search(r"now requests/s [\d.]+, rows/s [\d.]+", labels[0])
    assert re.search(r"p50 [\d.]+ [mµ]?s, p95 [\d.]+ [mµ]?s, p99 [\d.]+ [mµ]?s", labels[1])
    assert "mean rows 2" in labels[3]
    assert tab.run(f"document.querySelector('{panel} .plot .line0').getAttribute('d').length") > 5
    texts = tab.run(
        f"[...document.querySelector('{panel} .plot').querySelectorAll('text')].map(t => t.textContent)"
    )
    assert {"0", "now", "2 min ago"} <= set(texts)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_text_contrast_is_sufficient_and_nothing_overflows(tab: Tab, width: int, dark: bool) -> None:
    tab.show(width, dark=dark)
    for name in ("double", "brightest", "embedder", "fake_llm"):
        panel = choose(tab, name)
        tab.run(f"document.querySelectorAll('{panel} details').forEach(d => {{ d.open = true; }})")
        assert tab.run("document.documentElement.scrollWidth") <= width, name
        assert tab.run(CONTRAST) == [], name


@needs_browser
def test_every_control_and_plot_has_an_accessible_name(tab: Tab) -> None:
    for name in ("double", "brightest", "embedder", "fake_llm"):
        choose(tab, name)
        assert tab.run(NAMELESS) == [], name


@needs_browser
def test_page_asks_for_the_api_key_until_it_is_valid(browser: Tab) -> None:
    with live(double(), api_key="s3cret") as server:
        browser.leave()
        browser.go(server.url)
        for key, said in (("wrong", ""), ("s3cret", "rejected")):
            browser.until("document.getElementById('key').open")
            assert said in browser.run("document.getElementById('key-error').textContent")
            browser.type(key)
            browser.press("Enter")
            browser.until(
                "!document.getElementById('key').open || document.getElementById('key-error').textContent"
            )
        browser.until("document.getElementById('state').textContent === 'ready'")
        assert browser.run("sessionStorage.length") == 1
        assert browser.run("localStorage.length") == 0
        assert [error for error in browser.errors if "401" not in error] == []


@needs_browser
def test_page_reports_an_unreachable_server(browser: Tab) -> None:
    with live(double()) as server:
        browser.go(server.url)
        browser.until("document.getElementById('state').textContent === 'ready'")
    browser.until("document.getElementById('state').textContent === 'unreachable'")


NAMELESS = """[...document.querySelector('[role=tabpanel]:not([hidden])')
.querySelectorAll('input, textarea, select, button, svg[role=img], canvas')]
.filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')))
.map(e => e.outerHTML.slice(0, 80))"""

# Every visible text against what is painted behind it: 4.5 : 1, as WCAG's AA has it.
CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const parse = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const over = (top, under) => top.slice(0, 3).map((v, at) => v * top[3] + under[at] * (1 - top[3]));
  const behind = (element) => { const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]); };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const low = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest('.skip, noscript, :disabled')) continue;
    const style = getComputedStyle(element);
    const ink = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
    const back = behind(element.closest('svg') ?? element);
    const [a, b] = [light(over(parse(ink), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${node.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return low;
})()"""
