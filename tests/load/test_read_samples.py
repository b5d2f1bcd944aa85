"""--data: every form becomes checked, named, batch-first samples; random only by its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from infer.errors import InputError, SourceError, UnsafeSourceError, UsageError
from infer.load import LoadedModel, read_data
from infer.load.samples import read_samples
from infer.plan import Plan
from infer.spec import TensorSpec


def model(*specs: str, task: str = "tensors", **more: object) -> LoadedModel:
    return LoadedModel("module", None, None, tuple(map(TensorSpec.parse, specs)), {}, "", task=task, **more)


TWO = model("x=float32[batch,3]", "ids=int64[batch,seq]")
ONE = model("x=float32[batch,3]")
X = np.arange(12, dtype=np.float64).reshape(4, 3)
IDS = np.ones((4, 5), dtype=np.int32)


def test_npz_is_read_by_name_and_cast(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", ids=IDS, x=X, more=X)
    samples, said, digest = read_data(str(tmp_path / "d.npz"), TWO)
    assert list(samples) == ["x", "ids"]
    assert samples["x"].dtype == torch.float32
    assert samples["ids"].dtype == torch.int64
    assert said == f"--data {tmp_path / 'd.npz'}"
    assert len(digest) == 64


def test_one_array_needs_no_name_for_one_input(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", X)
    np.savez(tmp_path / "d.npz", whatever=X)
    torch.save(torch.from_numpy(X), tmp_path / "d.pt")
    for name in ("d.npy", "d.npz", "d.pt"):
        assert torch.equal(read_data(str(tmp_path / name), ONE)[0]["x"], torch.from_numpy(X).float())


def test_a_torch_dict_and_a_folder_of_arrays_are_read(tmp_path: Path) -> None:
    torch.save({"x": torch.from_numpy(X), "ids": torch.from_numpy(IDS)}, tmp_path / "d.pt")
    assert read_data(str(tmp_path / "d.pt"), TWO)[0]["ids"].shape == (4, 5)
    (tmp_path / "many").mkdir()
    for i in range(3):
        np.savez(tmp_path / "many" / f"{i}.npz", x=X + i, ids=IDS)
    samples, _, digest = read_data(str(tmp_path / "many"), TWO)
    assert samples["x"].shape == (12, 3)
    np.savez(tmp_path / "many" / "2.npz", x=X, ids=IDS)
    assert read_data(str(tmp_path / "many"), TWO)[2] != digest


def test_a_function_of_the_users_is_called(tmp_path: Path) -> None:
    path = tmp_path / "inputs.py"
    path.write_text(
        "import torch\ndef held_out():\n    return {'x': torch.ones(2, 3)}\ndef bad(): return 3\n"
    )
    samples, said, _ = read_data(f"{path}:held_out", ONE)
    assert samples["x"].shape == (2, 3)
    assert said == f"--data {path}:held_out"
    with pytest.raises(UsageError, match="has no function 'gone'"):
        read_data(f"{path}:gone", ONE)
    with pytest.raises(SourceError, match="expected a dict of tensors by input name, got int"):
        read_data(f"{path}:bad", ONE)


def test_random_tokens_are_of_the_whole_vocabulary() -> None:
    specs = (
        "input_ids=int64[batch,seq]",
        "attention_mask=int64[batch,seq]",
        "token_type_ids=int64[batch,seq]",
    )
    samples, _, _ = read_data("random", model(*specs, meta={"vocab_size": 1000}))
    assert samples["input_ids"].max() in range(500, 1000)
    assert samples["attention_mask"].min() == 1
    assert samples["token_type_ids"].max() == 1
    padded, _, _ = read_data("random", model(*specs, meta={"vocab_size": 2, "pad_id": 1}))
    assert padded["input_ids"].max() == 0


def test_random_data_is_reported_seeded_and_opt_in() -> None:
    samples, said, digest = read_data("random", TWO, seed=3)
    assert samples["x"].shape == (8, 3)
    assert samples["ids"].shape == (8, 8)
    assert "say nothing about fidelity" in said
    assert read_data("random", TWO, seed=3)[2] == digest
    assert read_data("random", TWO, seed=4)[2] != digest


def test_a_fixed_batch_takes_the_first_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", X)
    samples, _, _ = read_data(str(tmp_path / "d.npy"), model("x=float32[2,3]"))
    assert torch.equal(samples["x"], torch.from_numpy(X[:2]).float())


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": X}, r"expected input 'ids' int64 \[batch, seq\], got x"),
        ({"x": X[:, :2], "ids": IDS}, r"expected input 'x' float32 \[batch, 3\], got float32 \[4, 2\]"),
        ({"x": X, "ids": IDS[:3]}, r"with batch=4, got int64 \[3, 5\]"),
        ({"x": X, "ids": IDS.astype(np.float32)}, "expected input 'ids' int64"),
        ({"x": X[:0], "ids": IDS[:0]}, "at least one row"),
        ({"x": np.array([["a"] * 3] * 4), "ids": IDS}, "expected numbers, got <U1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict, text: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=text):
        read_data(str(tmp_path / "d.npz"), TWO)


def test_pickled_arrays_and_code_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SourceError, match="without pickle"):
        read_data(str(tmp_path / "d.npy"), ONE)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "d.pt")
    with pytest.raises(UnsafeSourceError, match="weights-only loader refuses it"):
        read_data(str(tmp_path / "d.pt"), ONE)


def test_unsupported_data_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no .*gone.npz"):
        read_data(str(tmp_path / "gone.npz"), ONE)
    (tmp_path / "a.csv").write_text("1,2,3")
    with pytest.raises(SourceError, match="expected .npz, .npy, .pt, .txt, images or sounds, got a.csv"):
        read_data(str(tmp_path / "a.csv"), ONE)
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UsageError, match="text needs a model with a tokenizer.json"):
        read_data(str(tmp_path / "a.txt"), ONE)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i + 2 for i in range(50)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_text_for_an_encoder_is_one_padded_row_a_paragraph(tmp_path: Path, tokenizer: Path) -> None:
    encoder = model(
        "input_ids=int64[batch,seq]", "attention_mask=int64[batch,seq]", task="embedding",
        files={"tokenizer.json": tokenizer}, meta={"max_length": 4, "pad_id": 0},
    )  # fmt: skip
    (tmp_path / "a.txt").write_text("w0 w1\nw2\n\n\nw3\n\nw4 w5 w6 w7 w8")
    samples, _, _ = read_data(str(tmp_path / "a.txt"), encoder)
    assert samples["input_ids"].tolist() == [[2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 8, 9]]
    assert samples["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_text_for_a_language_model_is_full_windows(tmp_path: Path, tokenizer: Path) -> None:
    decoder = model(
        "input_ids=int64[batch,seq]", task="text-generation",
        files={"tokenizer.json": tokenizer}, meta={"max_length": 10, "pad_id": None},
    )  # fmt: skip
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ".join(f"w{i}" for i in range(33)))
    (tmp_path / "texts" / "b.txt").write_text(" ".join(["w1"] * 1000))
    samples, _, _ = read_data(str(tmp_path / "texts"), decoder)
    assert samples["input_ids"].shape == (103, 10)
    assert samples["input_ids"][0].tolist() == list(range(2, 12))
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    assert read_data(str(tmp_path / "short.txt"), decoder)[0]["input_ids"].tolist() == [[3, 4, 5]]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(InputError, match="expected text, got no token"):
        read_data(str(tmp_path / "empty.txt"), decoder)


def test_arrays_of_tokens_judge_by_half_of_all_rows(tmp_path: Path) -> None:
    encoder = model("input_ids=int64[batch,seq]", task="embedding")
    np.savez(tmp_path / "d.npz", input_ids=np.arange(300 * 4).reshape(300, 4))
    plan = Plan(source="m.pt", quant="nf4", data=str(tmp_path / "d.npz"))
    encoder = read_samples.with_samples(plan, encoder, None)
    assert encoder.samples["input_ids"].shape == encoder.calibration["input_ids"].shape == (150, 4)
    assert not encoder.training


def test_texts_that_do_not_judge_calibrate(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{i % 50} w{i // 50}" for i in range(1000)))
    for calibrate, rows in (("auto", 936), ("none", 0)):
        encoder = model("input_ids=int64[batch,seq]", task="embedding", files={"tokenizer.json": tokenizer})
        plan = Plan(source="m.pt", quant="nf4", data=str(tmp_path / "a.txt"), calibrate=calibrate)
        encoder = read_samples.with_samples(plan, encoder, None)
        assert len(encoder.samples["input_ids"]) == 64
        assert len(encoder.training.get("input_ids", ())) == rows


def test_json_files_are_not_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([1]))
    with pytest.raises(SourceError, match="got a.json"):
        read_data(str(tmp_path / "a.json"), ONE)


IMAGE = "image=float32[batch,3,8,6]"


def picture(path: Path, size: tuple[int, int], colour: tuple[int, int, int]) -> None:
    images = pytest.importorskip("PIL.Image")
    path.parent.mkdir(exist_ok=True)
    images.new("RGB", size, colour).save(path)


def test_a_folder_of_images_is_scaled_and_cut_to_the_input(tmp_path: Path) -> None:
    picture(tmp_path / "many" / "a.png", (60, 20), (255, 0, 0))
    picture(tmp_path / "many" / "b.JPG", (8, 30), (0, 0, 255))
    samples, _, digest = read_data(str(tmp_path / "many"), model(IMAGE))
    assert samples["image"].shape == (2, 3, 8, 6)
    assert samples["image"].dtype == torch.float32
    assert samples["image"][0, :, 4, 3].tolist() == [1.0, 0.0, 0.0]
    assert samples["image"][1, 2].mean() > 0.9
    assert len(digest) == 64
    whole = read_data(str(tmp_path / "many"), model("image=uint8[batch,1,4,4]"))[0]["image"]
    assert whole.shape == (2, 1, 4, 4)
    assert whole.dtype == torch.uint8


def test_a_folder_of_classes_is_read_through(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name in ("cat", "dog"):
        picture(tmp_path / "all" / name / "1.png", (9, 9), (9, 9, 9))
    assert read_data(str(tmp_path / "all"), model(IMAGE))[0]["image"].shape == (2, 3, 8, 6)


def test_images_for_another_model_and_broken_ones_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", (9, 9), (1, 2, 3))
    for specs in (
        ["x=float32[batch,3]"],
        ["x=float32[batch,3,h,w]"],
        ["x=float32[batch,4,8,8]"],
        [IMAGE, "y=float32[batch,3]"],
    ):
        with pytest.raises(InputError, match="image files need a model with one input"):
            read_data(str(tmp_path / "a.png"), model(*specs))
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match="expected an image"):
        read_data(str(tmp_path / "b.png"), model(IMAGE))
