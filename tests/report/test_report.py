"""The report as a value, as terminal text and as one HTML page; no timing decides anything here."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from rich.console import Console

from infer.artifact.store import Manifest
from infer.latency import Latency, Paired, Timing, summarize
from infer.plan import Plan
from infer.report import build, document
from infer.report.measurements.memory import Memory
from infer.report.measurements.roofline import MachineRoofline, RooflineBound
from infer.report.rendering import formatting, html, optimize_summary, terminal
from infer.results import BackendResult, Metric
from infer.spec import Choice, Finding, LayerChoice, TensorSpec

DATA = next(folder for folder in Path(__file__).resolve().parents if folder.name == "tests") / "data"


def pair(ours: float, theirs: float, verdict: str) -> Paired:
    ratio = ours / theirs
    sides = [
        summarize([t * s for s in (0.94, 0.97, 0.99, 1.0, 1.01, 1.04, 1.12, 1.3)], 2) for t in (ours, theirs)
    ]
    return Paired(ratio, ratio * 0.98, ratio * 1.02, verdict, 24, *sides)


FINDINGS = (
    Finding("load", "kind", "huggingface", why="config.json names BertModel"),
    Finding("compress", "layers", 36, why="int8, per output channel; pooler kept: 384 columns, used once"),
)  # fmt: skip

MEMORY = Memory(
    weights=23_400_000,
    weights_by_dtype={"int8": 10_600_000, "float32": 12_800_000},
    runtime=236_000_000,
    opened=61_000_000,
    run=14_000_000,
    steady=305_000_000,
    peak=311_000_000,
    open_seconds=0.84,
    anonymous=201_000_000,
    file_backed=104_000_000,
    batch=2,
    method="high-water mark of the kernel (VmHWM)",
)
SMALL = RooflineBound(batch=1, seconds=0.002167, bound="memory", num_bytes=23_400_000, flops=680_100_000)
LARGE = RooflineBound(batch=8, seconds=0.01101, bound="compute", num_bytes=23_400_000, flops=5_440_800_000)
CEILING = MachineRoofline(
    weight_bytes=23_400_000,
    read_bandwidth=10.8e9,
    multiply_peak=494e9,
    peak_source="4 x the measured float32 matmul, for int8",
    floors=(SMALL, LARGE),
)
BACKENDS = (
    BackendResult("inductor", "chosen", 0.0389, "2.10x faster at batch 1, 1.34x faster at batch 8"),
    BackendResult("ort", "tried", 0.0512, "1.61x faster at batch 1, within noise at batch 8"),
    BackendResult("eager", "tried", 0.0777, "1.02x slower at batch 1, same at batch 8"),
    BackendResult("trt", "refused", None, "no CUDA device"),
)  # fmt: skip
METRICS = (
    Metric("logits", "relative_error", 0.0183, detail="norm of the difference over that of the float output"),
    Metric("logits", "worst_row_error", 0.0391, detail="the same for the worst row"),
    Metric("logits", "cosine", 0.99983, detail="mean over rows"),
    Metric("logits", "max_abs", 0.311, detail="largest absolute difference"),
    Metric("logits", "rows", 256, detail="rows compared"),
    Metric("logits", "top1", 0.997, detail="share of rows whose best class is the float one"),
    Metric("logits", "kl", 0.0011, "nats", detail="mean KL(float || optimized)"),
    Metric("logits", "kl_max", 0.0042, "nats", detail="the worst row"),
)  # fmt: skip


def manifest(**changes: object) -> Manifest:
    made = Manifest(
        name="minilm",
        made_with="infer 0.1.0",
        plan=Plan(source="./MiniLM L6", quant="int8", dtype="float32", device="cpu", backend="inductor"),
        choices=(
            Choice("device", "auto", "cpu", "no CUDA device"),
            Choice("dtype", "auto", "float32", "CPUs without half-precision units are slower in it"),
            Choice(
                "backend", "auto", "inductor", "the fastest here; time of the others: ort 1.32x, eager 2.00x"
            ),
        ),
        backend="inductor",
        device="cpu",
        task="classification",
        inputs=(
            TensorSpec("input_ids", "int64", ("batch", "seq")),
            TensorSpec("attention_mask", "int64", ("batch", "seq")),
        ),
        outputs=(TensorSpec("logits", "float32", ("batch", 5)),),
        sizes={"batch": (1, 64), "seq": (1, 512)},
        target={"isa": "avx2"},
        versions={"python": "3.12.3", "torch": "2.13.0", "numpy": "2.4.6", "safetensors": "0.8.0"},
        meta={},
        verdict=(
            "2.10x faster at batch 1, 1.34x faster at batch 8 against inductor float32",
            "fidelity within the limits of int8",
        ),
        findings=FINDINGS,
    )
    return msgspec.structs.replace(made, **changes)


TIMED = [Timing(1, pair(0.0061, 0.0128, "faster")), Timing(8, pair(0.0328, 0.0441, "faster"))]


def sample(
    fidelity: tuple[Metric, ...] = METRICS, measured: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> document.Report:
    """Make a report of the manifest with `changes`; `measured` replaces results."""
    results = build.Results(
        fidelity=fidelity,
        backends=BACKENDS,
        latency=TIMED,
        size=23_400_000,
        baseline="inductor float32",
        original_size=90_900_000,
        ceiling=CEILING,
        memory=MEMORY,
    )
    return build.build_report(manifest(**changes), replace(results, **measured))


def test_large_rows_that_check_an_artifact_are_named_beside_its_size() -> None:
    large, small = (sample(measured={"rows_size": size}) for size in (1_150_000, 500_000))
    said = "23.4 MB, was 90.9 MB (3.9x smaller), 1.15 MB of rows to check it with"
    assert said in " ".join(" ".join(optimize_summary.screen(large, Path("x.infer"))).split())
    assert "rows to check" not in " ".join(optimize_summary.screen(small, Path("x.infer")))
    assert "1.15 MB of rows to check it with" in html.render_html(large)


class Page(HTMLParser):
    """Refuses what is not well-formed; collects text, tags and attributes."""

    VOID = ("meta", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(report: document.Report) -> Page:
    page = Page()
    page.feed(html.render_html(report))
    page.close()
    assert page.open == []
    return page


def printed(report: document.Report, width: int | None = None) -> str:
    out = io.StringIO()
    terminal.render_terminal(report, Console(file=out, width=width, force_terminal=width is not None))
    return out.getvalue()


def test_the_headline_has_speed_size_fidelity_and_verdict() -> None:
    said = sample().headline
    assert said == "faster 2.10x (batch 1), 1.34x (batch 8) · 3.9x smaller · top-1 agreement 99.7 % · passed"


@pytest.mark.parametrize(
    ("formats", "bits", "said"),
    [
        (("float", "fp16"), None, "inductor fp16 (int8 was asked for), cpu"),
        (("int8", "fp16"), None, "inductor int8, cpu"),
        (("int8", "nf4"), 5.0, "inductor mixed formats (--bits 5), cpu"),
    ],
)
def test_the_first_line_names_the_formats_that_layers_have(
    formats: tuple[str, ...], bits: float | None, said: str
) -> None:
    layers = tuple(LayerChoice(f"layer{number}", name, 16.0) for number, name in enumerate(formats))
    plan = manifest().plan.with_(bits=bits)
    first, *_ = optimize_summary.screen(sample(layers=layers, plan=plan), Path("x.infer"))
    assert first == f"minilm: passed. {said}"


def test_a_report_round_trips_through_json() -> None:
    report = sample()
    again = document.decode(document.encode(report))
    assert again == report
    assert b'"original_size": 90900000' in document.encode(report)


def test_unknown_figures_are_null_in_json_and_a_dash_in_text() -> None:
    unknown = {"memory": Memory(failure="the probe failed: killed"), "original_size": None, "ceiling": None}
    report = sample((Metric("logits", "relative_error", 0.01),), unknown)
    data = document.encode(report)
    assert b"Infinity" not in data
    assert b"NaN" not in data
    assert report.original_size is None
    assert report.latency[0].floor is None
    assert re.search(r"peak +- +the probe failed", printed(report))


def test_a_damaged_report_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        document.decode(b'{"name": 3}')


def test_a_violated_limit_fails_the_report_and_names_the_metric() -> None:
    worse = tuple(msgspec.structs.replace(m, value=0.9) if m.name == "top1" else m for m in METRICS)
    report = sample(worse)
    assert not report.passed
    assert report.headline.endswith("· failed")
    assert report.failure == "logits.top1 0.900 is below 0.98 allowed for int8"
    page = read(report)
    assert ("class", "failed") in page.attributes
    assert ("class", "over") in page.attributes
    assert report.failure in page.text


def test_fidelity_rows_carry_their_limit_and_how_much_of_it_is_used() -> None:
    rows = {row.what: row for row in sample().fidelity}
    assert rows["logits.relative_error"].used == pytest.approx(0.183)
    assert rows["logits.top1"].used == pytest.approx(0.15)
    assert rows["logits.top1"].ok is True
    assert rows["logits.max_abs"].limit is None
    assert rows["logits.max_abs"].ok is None


def test_a_single_flip_among_few_rows_reads_as_within() -> None:
    few = (Metric("logits", "rows", 8), Metric("logits", "top1", 0.875))
    assert sample(few).fidelity[1].ok is True


def test_max_error_is_the_only_limit_when_it_is_given() -> None:
    plan = Plan(source="m", quant="int8", dtype="float32", max_error=0.01)
    report = sample(plan=plan)
    judged = [row.what for row in report.fidelity if row.limit is not None]
    assert judged == ["logits.relative_error"]
    assert report.failure == "logits.relative_error 0.0183 is above 0.01 allowed by --max-error"


def test_latency_rows_know_their_share_of_the_ceiling() -> None:
    row = sample().latency[0]
    assert row.floor == pytest.approx(0.002167)
    assert row.of_ceiling == pytest.approx(0.002167 / row.ours.p50)
    assert row.bound == "memory"
    assert sample().baseline == "inductor float32"


def test_a_share_of_the_ceiling_never_reads_above_all_of_it() -> None:
    assert formatting.of_ceiling(10.996) == "≥ 100 %"
    assert formatting.of_ceiling(0.63, in_cache=True) == "63.0 % (in cache)"
    cached = msgspec.structs.replace(SMALL, in_cache=True)
    report = sample(measured={"ceiling": msgspec.structs.replace(CEILING, floors=(cached,))})
    assert report.latency[0].in_cache
    assert "a call at batch 1, memory-bound, in cache" in printed(report)


def test_chosen_tried_and_refused_backends_stand_in_that_order() -> None:
    assert [(t.name, t.outcome) for t in sample().tried] == [
        ("inductor", "chosen"),
        ("ort", "tried"),
        ("eager", "tried"),
        ("trt", "refused"),
    ]


def test_page_is_well_formed_and_refers_to_nothing_outside() -> None:
    page = read(sample())
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [
        name for name, _ in page.attributes if name in ("src", "href", "style") or name.startswith("on")
    ]
    text = html.render_html(sample())
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text)


def test_the_page_has_verdict_choices_figures_and_command() -> None:
    text = read(sample()).text
    for said in ("3.9x smaller", "no CUDA device", "0.477 [0.467, 0.486]", "high-water mark", "torch 2.13.0"):
        assert said in text
    assert "infer optimize './MiniLM L6' --output minilm.infer --backend inductor --quant int8" in text
    assert (
        text.index("passed")
        < text.index("Tried and refused")
        < text.index("Latency")
        < text.index("Make it again")
    )


def test_every_table_has_a_caption_and_every_chart_a_label() -> None:
    page = read(sample())
    assert page.tags.count("table") == page.tags.count("caption")
    labelled = [name for name, _ in page.attributes if name in ("aria-label", "aria-hidden")]
    assert len(labelled) == page.tags.count("svg")


def test_names_are_escaped_everywhere() -> None:
    evil = '<script>alert("x")</script>&'
    report = sample(
        name=evil,
        plan=Plan(source=evil, dtype="float32"),
        backend=evil,
        task=evil,
        choices=(Choice(evil, evil, evil, evil),),
        inputs=(TensorSpec(evil, evil, (evil,)),),
        verdict=(evil,),
        versions={evil: evil},
        findings=(
            Finding("compress", f"refused {evil}", None, why=evil),
            Finding("load", evil, evil, why=evil),
        ),
    )
    page = read(report)
    assert "script" not in page.tags
    assert page.text.count(evil) > 10
    assert evil in printed(report)


def test_rich_markup_in_a_name_is_printed_as_it_is() -> None:
    assert "[bold red]x[/]" in printed(sample(verdict=("[bold red]x[/]",)))


def test_plain_text_has_no_escape_codes_and_at_most_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(sample())
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert all(line == line.rstrip() for line in lines)
    assert lines[1].endswith("passed")
    assert lines[-2].startswith("infer optimize './MiniLM L6' ")


def test_a_narrow_terminal_keeps_the_verdict_of_each_batch() -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(sample(), width=60))
    row = next(line for line in text.splitlines() if line.strip().startswith("1 "))
    assert row.split()[:3] == ["1", "6.13", "ms"]
    assert row.split()[-2:] == ["faster", "2.10x"]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 60


def test_the_model_card_precedes_the_figures() -> None:
    text = printed(sample())
    assert "bandwidth  10.8 GB/s (measured, all threads)" in text
    assert text.index("Card") < text.index("Latency") < text.index("Fidelity") < text.index("Memory")


def luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(2 * c for c in colour)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ink", ["ink", "soft", "good", "bad"])
def test_text_contrast_is_sufficient_in_light_and_dark_mode(ink: str) -> None:
    from infer.report.rendering.page import CSS

    for palette in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL):
        colours = dict(re.findall(r"--([a-z0-9]+):\s*#([0-9a-f]{3,6})", palette))
        front, back = luminance(colours[ink]), luminance(colours["card"])
        assert (max(front, back) + 0.05) / (min(front, back) + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (2.5, "2.50 s"), (0.0123, "12.3 ms"), (4.2e-6, "4.20 µs"), (3e-9, "3.00 ns"), (0.0, "0 s")],
)
def test_seconds_are_printed_with_three_significant_digits(value: float | None, said: str) -> None:
    assert formatting.seconds(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(None, "-"), (12, "12 B"), (23_400_000, "23.4 MB"), (1_234_000_000_000, "1.23 TB")]
)
def test_sizes_are_powers_of_ten(value: int | None, said: str) -> None:
    assert formatting.size(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0.997, "99.7 %"), (0.99996, "99.996 %"), (1.0, "100 %"), (0.0, "0 %")]
)
def test_shares_are_never_rounded_up_to_all(value: float, said: str) -> None:
    assert formatting.share(value) == said


def test_larger_and_equal_sizes_are_reported_as_such() -> None:
    assert formatting.smaller(100, 200) == "2.0x larger"
    assert formatting.smaller(100, 101) == "same size"
    assert formatting.smaller(None, 5) is None


def test_mixed_verdicts_are_reported_per_batch() -> None:
    pairs = [(1, pair(1.0, 2.0, "faster")), (8, pair(1.0, 1.0, "same"))]
    assert formatting.speeds(pairs) == "faster 2.00x (batch 1), same (batch 8)"
    assert formatting.speeds([(1, pair(1.0, 1.0, "same")), (8, pair(1.0, 1.0, "same"))]) == "same"
    tiny = [(1, pair(14e-6, 13e-6, "slower")), (8, pair(1.0, 0.5, "slower"))]
    assert formatting.speeds(tiny) == "slower 1.00 µs (batch 1), 2.00x (batch 8)"


def test_command_repeats_every_option_that_is_not_the_default() -> None:
    plan = Plan(
        source="m.pt",
        quant="nf4",
        inputs=("x=float32[batch,3]",),
        batches=(4,),
        trust_code=True,
        max_error=0.2,
    )
    said = formatting.command(plan, "m.infer")
    assert said == (
        "infer optimize m.pt --output m.infer --quant nf4 --input 'x=float32[batch,3]' --trust-code "
        "--max-error 0.2 --batch 4"
    )


def test_a_latency_round_trips_through_json() -> None:
    taken = Latency(1.0, 2.0, 3.0, 1.5, 0.5, 9, 0.2, 3)
    assert msgspec.json.decode(msgspec.json.encode(taken), type=Latency) == taken


def test_a_written_report_opens_and_another_format_does_not() -> None:
    data = (DATA / "report.json").read_bytes()
    with pytest.raises(msgspec.ValidationError, match="expected report format 2, got 1"):
        document.decode(msgspec.json.encode(msgspec.json.decode(data) | {"format": 1}))
    old = document.decode(data)
    assert {row.metric for row in old.fidelity if row.limit is not None} == {
        "perplexity_change",
        "schedule_error",
    }
    assert "perplexity change" in "\n".join(optimize_summary.screen(old, Path("old.infer")))
    assert "decode.schedule_error" in printed(old)
    assert document.decode(document.encode(old)) == old
