"""Readers: equal to torch and safetensors on what is sound, a sentence on what is not."""

from __future__ import annotations

import json
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from infer.errors import InferError, ResourceError, SourceError, UnsafeSourceError
from infer.weights import Checkpoint, finite, in_memory, non_finite, num_bytes
from infer.weights.file_blocks import row_blocks
from infer.weights.pickle_scan import code_among, globals_of
from infer.weights.safetensors_file import open_safetensors
from infer.weights.safetensors_writer import write_safetensors
from infer.weights.torch_file import open_torch


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(7, 5),
        "half": torch.randn(3, 2).half(),
        "brain": torch.randn(3, 2).bfloat16(),
        "ids": torch.arange(6).view(3, 2),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
    }


def assert_equal_to(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint) == sorted(expected)
    for name, value in expected.items():
        weight = checkpoint[name]
        assert weight.dtype == value.dtype
        assert weight.shape == tuple(value.shape)
        assert torch.equal(weight.read(), value)
        if value.ndim:
            assert torch.equal(weight.rows(1, 3), value[1:3])
            assert torch.equal(torch.cat([b for _, b in weight.blocks(16)] or [value]), value)


def test_every_checkpoint_gives_what_was_saved(tmp_path: Path) -> None:
    saved = tensors()
    torch.save(saved, tmp_path / "a.pt")
    save_file(saved, tmp_path / "a.safetensors")
    assert_equal_to(open_torch(tmp_path / "a.pt", verify=True).weights, saved)
    assert_equal_to(open_safetensors(tmp_path / "a.safetensors").weights, saved)
    assert_equal_to(in_memory(saved), saved)


def test_read_tensors_own_their_memory(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2, 2)}
    torch.save(saved, tmp_path / "a.pt")
    for checkpoint in (open_torch(tmp_path / "a.pt").weights, in_memory(saved)):
        checkpoint["a"].read().zero_()
        checkpoint["a"].rows(0, 1).zero_()
        assert torch.equal(checkpoint["a"].read(), torch.ones(2, 2))


def test_strided_shared_and_parameter_tensors_read_right(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    saved = {
        "a": base,
        "same": base,
        "part": base[2:4],
        "turned": base.t(),
        "own": nn.Parameter(torch.randn(3)),
    }
    saved["inner"] = base[:, 2:5]
    torch.save(saved, tmp_path / "a.pt")
    assert_equal_to(
        open_torch(tmp_path / "a.pt").weights, {name: value.detach() for name, value in saved.items()}
    )


def test_tensors_saved_from_a_gpu_are_read_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"a": torch.randn(4, 3), "b": torch.randn(3).bfloat16()}
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(saved, tmp_path / "a.pt")
    monkeypatch.undo()
    assert b"cuda:0" in (tmp_path / "a.pt").read_bytes()
    assert_equal_to(open_torch(tmp_path / "a.pt").weights, saved)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda sd: {"epoch": 3, "state_dict": sd}, ["took 'state_dict', left epoch"]),
        (
            lambda sd: {"model": sd, "optimizer": {"state": {0: torch.zeros(1)}}},
            ["took 'model', left optimizer"],
        ),
        (lambda sd: {"outer": {"model": sd}}, ["took 'outer'", "took 'model'"]),
        (lambda sd: OrderedDict(sd, step=3), ["left step (not tensors)"]),
    ],
)
def test_containers_are_unwrapped_and_reported(tmp_path: Path, wrap: object, said: list[str]) -> None:
    torch.save(wrap({"fc.weight": torch.ones(2, 2)}), tmp_path / "a.pt")
    file = open_torch(tmp_path / "a.pt")
    assert list(file.weights) == ["fc.weight"]
    assert file.notes == said


def test_a_list_or_an_empty_mapping_is_no_state_dict(tmp_path: Path) -> None:
    for value, text in (([torch.ones(1)], "got a list"), ({"lr": 0.1}, "a mapping without tensors: lr")):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(SourceError, match=text):
            open_torch(tmp_path / "a.pt")


def test_a_flipped_bit_is_named_by_its_member(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    data = bytearray(path.read_bytes())
    data[open_torch(path).weights["a"].extent.offset + 100] ^= 4
    path.write_bytes(data)
    assert torch.load(path)["a"].count_nonzero() == 1
    with pytest.raises(SourceError, match=r"expected CRC \w+ for 'a/data/0', got \w+: the file is damaged"):
        open_torch(path, verify=True)


def test_an_expanded_tensor_of_a_million_million_elements_is_refused(tmp_path: Path) -> None:
    torch.save({"bomb": torch.zeros(1).expand(1 << 40)}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=r"got 'bomb' of shape \[1099511627776\] over 4 bytes"):
        open_torch(tmp_path / "a.pt")
    torch.save({"small": torch.zeros(1).expand(10)}, tmp_path / "b.pt")
    with pytest.raises(SourceError, match=r"needs 40 bytes, its storage has 4.*\.contiguous\(\)"):
        open_torch(tmp_path / "b.pt")


def rezip(path: Path, target: Path, change: object) -> Path:
    """Copy a zip member by member through `change(name, data) -> [(name, data)]`; "deflate" compresses."""
    method = zipfile.ZIP_DEFLATED if change == "deflate" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            parts = [(name, old.read(name))] if change == "deflate" else change(name, old.read(name))
            for each, data in parts:
                new.writestr(each, data)
    return target


def twice(name: str, data: bytes) -> list[tuple[str, bytes]]:
    return [(name, data)] * (2 if name.endswith("data.pkl") else 1)


def outside(name: str, data: bytes) -> list[tuple[str, bytes]]:
    return [(name, data), ("a/../../etc/x", b"")] if name.endswith("data.pkl") else [(name, data)]


def crowd(name: str, data: bytes) -> list[tuple[str, bytes]]:
    return [(name, data)] + ([(f"a/x{i}", b"") for i in range(10_001)] if name.endswith("data.pkl") else [])


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("deflate", "compressed: torch.save never compresses"),
        (twice, "duplicate member"),
        (outside, "points outside the file"),
        (crowd, "expected at most 10000 members"),
    ],
)
def test_archives_that_torch_never_writes_are_unsafe(tmp_path: Path, change: object, text: str) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt")
    with pytest.raises(UnsafeSourceError, match=text):
        open_torch(rezip(tmp_path / "a.pt", tmp_path / "b.pt", change))


def test_a_storage_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt")

    def shorter(name: str, data: bytes) -> list[tuple[str, bytes]]:
        return [(name, data[:8] if name.endswith("data/0") else data)]

    with pytest.raises(SourceError):
        open_torch(rezip(tmp_path / "a.pt", tmp_path / "b.pt", shorter))


def header(entries: object, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape or [(stop - start) // 4], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (header(b'{"a":1,"a":2}'), "duplicate key 'a'"),
        (header({}, length=200_000_000), "at most 100000000 bytes, got 200000000"),
        (header({"a": entry(0, 8)}, length=5000), "expected 5008 bytes of header, got a file of"),
        (header({"a": entry(4, 8)}), "leaves a hole before it: expected offset 0, got 4"),
        (header({"a": entry(0, 8), "b": entry(4, 8)}), "overlaps the tensor before it"),
        (header({"a": entry(0, 4)}), "4 bytes belong to none"),
        (header({"a": entry(0, 16)}), "expected 16 bytes of tensors, got 8: truncated"),
        (header({"a": entry(0, 8, [3])}), r"expected 12 bytes for 'a' F32 \[3\], got 8"),
        (header({"a": entry(0, 8, [0, 2**63 - 1])}), "overflows"),
        (header({"a": entry(0, 8, [2**32, 2**32])}), "overflows"),
        (header({"a": entry(0, 8, [-2])}), "not negative"),
        (header({"a": entry(0, 8, [True, 2])}), "not negative"),
        (header({"a": entry(0, 8, dtype="F3")}), "dtype 'F3' of 'a' can't be read"),
        (header({"a": {"dtype": "F32"}}), "expected dtype, shape and data_offsets"),
        (header(b"[1]"), "expected a JSON object as header, got list"),
        (header(b"{nope"), "not JSON"),
        (header(b'{"a":' + b"[" * 100_000), "not JSON"),
        (b"\1\2", "expected a header"),
    ],
)
def test_invalid_safetensors_are_refused_with_a_message(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=text) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "m-2.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    assert_equal_to(open_safetensors(index).weights, {"a": torch.ones(2), "b": torch.zeros(3)})


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"a": "../m-1.safetensors"}, "not beside it"),
        ({"a": "m-9.safetensors"}, "not beside it"),
        (
            {"a": "m-1.safetensors", "c": "m-1.safetensors"},
            "promises 'c' in m-1.safetensors, it is in no shard",
        ),
        ({}, "expected an index with 'weight_map'"),
    ],
)
def test_an_index_with_wrong_shards_is_refused(tmp_path: Path, weight_map: dict[str, str], text: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SourceError, match=text):
        open_safetensors(index)


def test_a_file_cut_off_while_open_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    weights = open_safetensors(path).weights
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(SourceError, match="the file is cut off"):
        weights["a"].read()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_named_by_tensor_and_rows(value: float) -> None:
    weight = torch.zeros(6, 2)
    weight[5, 1] = value
    checked = finite(in_memory({"fc.weight": weight}), "model.pt")["fc.weight"]
    assert torch.equal(checked.rows(0, 5), weight[:5])
    text = "got 1 NaN or infinite values in rows 4 to 6 of 'fc.weight' - at model.pt"
    with pytest.raises(SourceError, match=text):
        checked.rows(4, 6)
    with pytest.raises(SourceError, match="'fc.weight'"):
        checked.read()


def test_large_finite_weights_are_accepted() -> None:
    assert non_finite(torch.full((100,), 3e38)) == 0
    assert non_finite(torch.full((100,), 6e4, dtype=torch.float16)) == 0
    assert non_finite(torch.ones(3, dtype=torch.int64)) == 0
    assert non_finite(torch.empty(0)) == 0


def test_row_blocks_cover_all_rows_once() -> None:
    assert list(row_blocks((7, 4), 4, 32)) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert list(row_blocks((3, 100), 4, 8)) == [(0, 1), (1, 2), (2, 3)]
    assert list(row_blocks((0, 4), 4)) == []


def test_num_bytes_counts_floats_in_the_given_dtype() -> None:
    held = in_memory({"a": torch.zeros(10, dtype=torch.float16), "ids": torch.zeros(2, dtype=torch.int64)})
    assert num_bytes(held) == 36
    assert num_bytes(held, dtype=torch.float32) == 56


def test_globals_are_listed_without_running_anything(tmp_path: Path) -> None:
    import io
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, (f"touch {tmp_path}/ran",)

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        raw = pickle.dumps({"a": Payload()}, protocol=protocol)
        names = globals_of(io.BytesIO(raw), "x")
        assert names == ["posix.system"]
        assert code_among(names) == names
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SourceError, match="can't be parsed"):
        globals_of(io.BytesIO(b"\x80\x02\xff\xff"), "x")


def metas_of(saved: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (value.dtype, tuple(value.shape)) for name, value in saved.items()}


def test_what_is_written_one_by_one_is_read_by_safetensors_and_aligned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved, asked = tensors(), []

    def give(name: str) -> torch.Tensor:
        asked.append(name)
        return saved[name]

    write_safetensors(tmp_path / "a.safetensors", metas_of(saved), give, {"format": "pt"})
    assert sorted(asked) == sorted(saved)
    for name, value in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(value, saved[name])
    file = open_safetensors(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "pt"}
    assert_equal_to(file.weights, saved)
    assert all(file.weights[name].extent.offset % saved[name].element_size() == 0 for name in saved)


def test_writing_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(InferError, match=r"expected 'a' as torch.float32 \[2\], got torch.float32 \[3\]"):
        write_safetensors(path, {"a": (torch.float32, (2,))}, lambda name: torch.zeros(3))
    with pytest.raises(ResourceError, match="could not be written"):
        write_safetensors(tmp_path / "gone" / "a", {}, lambda name: torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized.*--quant int8"),
        (lambda: torch.eye(2).to_sparse(), "sparse.*to_dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse.*to_dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
    ids=["quantized", "sparse", "csr", "nested"],
)
def test_tensors_without_plain_rows_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], value: Callable[[], torch.Tensor], said: str
) -> None:
    torch.save({"weight": value()}, tmp_path / "a.pt")
    capfd.readouterr()
    with pytest.raises(SourceError, match=f"it holds {said.partition('.*')[0]}") as caught:
        open_torch(tmp_path / "a.pt")
    assert said.rpartition(".*")[2] in caught.value.message + str(caught.value.hint)
    assert capfd.readouterr().err == ""  # torch's own warnings and traces


def test_the_state_of_an_optimizer_is_named(tmp_path: Path) -> None:
    torch.save(torch.optim.Adam(nn.Linear(2, 2).parameters()).state_dict(), tmp_path / "a.pt")
    with pytest.raises(SourceError, match="got the state of an optimizer"):
        open_torch(tmp_path / "a.pt")


def test_complex_and_power_of_two_numbers_are_read(tmp_path: Path) -> None:
    values = {"freqs": torch.randn(3, 2, dtype=torch.complex64)}
    save_file(values, tmp_path / "a.safetensors")
    assert torch.equal(open_safetensors(tmp_path / "a.safetensors").weights["freqs"].read(), values["freqs"])
    header = b'{"scale":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x7f\x80")
    assert open_safetensors(tmp_path / "b.safetensors").weights["scale"].read().float().tolist() == [1.0, 2.0]
    packed = header.replace(b"F8_E8M0", b"F4")
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(packed)) + packed + b"\0\0")
    with pytest.raises(SourceError, match="'scale' has the dtype F4, which is not supported"):
        open_safetensors(tmp_path / "c.safetensors")
