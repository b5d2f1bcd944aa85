"""Depth, video, time series, pages, vectors of sound and masks with classes: opened, and equal to transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infer.errors import InferError
from infer.load import fill, load
from infer.load.heads.sound_wrappers import SoundVectors
from infer.load.heads.wrappers import MaskSegmenter
from infer.load.samples.read_samples import random_inputs
from infer.plan import Plan
from infer.run.float_graph import float_graph
from infer.spec import TensorSpec
from infer.tasks import answers
from tests.support.random_heads import save_head

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "num_labels": 3,
}  # fmt: skip
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 1}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 8}
SOUND: dict[str, Any] = {
    **SMALL, "vocab_size": 24, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SERIES: dict[str, Any] = {
    "num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32, "ffn_dim": 48,
    "num_attention_heads": 2, "num_hidden_layers": 1, "prediction_length": 8, "loss": "mse",
}  # fmt: skip
DEPTH: dict[str, Any] = {
    **IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4,
    "fusion_hidden_size": 8,
}  # fmt: skip


saved = partial(save_head, std=0.2)


@pytest.mark.parametrize(
    ("config", "head", "sizes", "task", "output"),
    [
        ("dpt", "DPTForDepthEstimation", DEPTH, "depth-estimation", "predicted_depth"),
        (
            *("videomae", "VideoMAEForVideoClassification", {**IMAGE, "num_frames": 2}),
            *("video-classification", "logits"),
        ),
        ("patchtst", "PatchTSTForPrediction", SERIES, "time-series-forecasting", "prediction_outputs"),
        (
            *("layoutlmv3", "LayoutLMv3ForTokenClassification"),
            {**TEXT, "input_size": 16, "patch_size": 8, "coordinate_size": 4, "shape_size": 8},
            *("token-classification", "logits"),
        ),
        ("wav2vec2", "Wav2Vec2ForAudioFrameClassification", SOUND, "audio-frame-classification", "logits"),
    ],
)
def test_outputs_equal_those_of_transformers(
    config: str, head: str, sizes: dict[str, Any], task: str, output: str, tmp_path: Path
) -> None:
    model = saved(config, head, sizes, tmp_path)
    loaded = load(Plan(source=str(tmp_path), data="random", max_length=32))
    fill(loaded)
    assert (loaded.task, loaded.outputs) == (task, (output,))
    graph = float_graph(loaded)
    given = random_inputs(graph.inputs, 3, {"samples": (1600, 4000)}, 64, 1, rows=2)
    with torch.no_grad():
        expected = model(**given)[output]
    torch.testing.assert_close(graph.run(given)[output], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", ["LongformerForSequenceClassification", "LongformerForMaskedLM"])
def test_longformer_of_any_length_equals_its_chunks(head: str, tmp_path: Path) -> None:
    model = saved("longformer", head, {**TEXT, "attention_window": 4}, tmp_path)
    loaded = load(Plan(source=str(tmp_path), data="random", max_length=32))
    fill(loaded)
    graph = float_graph(loaded)
    for length in (1, 19):
        ids = torch.randint(3, 64, (2, length))
        mask = torch.ones_like(ids)
        mask[1, 12:] = 0
        given = {"input_ids": ids.where(mask != 0, 1), "attention_mask": mask}
        types = {"token_type_ids": torch.zeros_like(ids)} if "token_type_ids" in graph.samples else {}
        with torch.no_grad():
            expected = model(**given, **types).logits
        got = graph.run({**given, **types})["logits"]
        real = got.dim() == 2 or mask.bool()
        torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-4)


def test_longformer_makes_the_question_global(tmp_path: Path) -> None:
    model = saved(
        *("longformer", "LongformerForQuestionAnswering"),
        {**TEXT, "attention_window": 4, "num_labels": 2, "sep_token_id": 2},
        tmp_path,
    )
    loaded = load(Plan(source=str(tmp_path), data="random", max_length=32))
    fill(loaded)
    ids = torch.randint(3, 64, (2, 17))
    ids[0, [4, 5, 16]], ids[1, [7, 8, 16]] = 2, 2
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    graph = float_graph(loaded)
    types = {"token_type_ids": torch.zeros_like(ids)} if "token_type_ids" in graph.samples else {}
    with torch.no_grad():
        expected = model(**given)
    for name, value in graph.run({**given, **types}).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


def test_an_audio_embedding_does_not_depend_on_padding() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(**SOUND, feat_extract_norm="layer", do_stable_layer_norm=True)
    encoder = SoundVectors(transformers.Wav2Vec2Model(config).eval(), ("input_values", "attention_mask"))
    sound = torch.randn(1, 3200)
    alone = encoder(sound, torch.ones(1, 3200, dtype=torch.long))
    mask = (torch.arange(4800) < 3200).long()[None]
    padded = encoder(torch.nn.functional.pad(sound, (0, 1600)), mask)
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-3)


def test_segmentation_masks_give_the_classes_of_transformers() -> None:
    from transformers import Mask2FormerImageProcessorPil
    from transformers.models.mask2former.modeling_mask2former import (
        Mask2FormerForUniversalSegmentationOutput as Output,
    )

    generator = torch.Generator().manual_seed(0)
    found = Output(
        class_queries_logits=8 * torch.randn((1, 9, 4), generator=generator),
        masks_queries_logits=8 * torch.randn((1, 9, 12, 12), generator=generator),
    )
    expected = Mask2FormerImageProcessorPil().post_process_semantic_segmentation(found, [(40, 56)])[0]
    logits = MaskSegmenter(Fixed(found), (384, 384))(torch.zeros(1, 3, 48, 48))
    got = answers.class_map(logits[0].numpy(), (40, 56))
    assert (got == expected.numpy()).mean() > 0.999
    assert len(np.unique(got)) > 1


class Fixed(torch.nn.Module):
    """A model that always gives the same output."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def forward(self, **_: Any) -> Any:
        return self.found


def test_synthetic_bounding_boxes_lie_within_the_page() -> None:
    boxes = random_inputs((TensorSpec("bbox", "int64", ("batch", "seq", 4)),), 0)["bbox"]
    assert int(boxes.min()) >= 0
    assert int(boxes.max()) <= 1000
    assert bool((boxes[..., :2] <= boxes[..., 2:]).all())


def test_a_depth_map_has_the_size_of_the_image() -> None:
    depth = torch.rand((1, 1, 8, 6), generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(depth, (20, 33), mode="bilinear")[0, 0].numpy()
    np.testing.assert_allclose(answers.depth_map(depth[0, 0].numpy(), (20, 33)), expected, atol=1e-6)
    found = answers.depth_range(depth[0, 0].numpy())
    assert found["min"] < found["mean"] < found["max"]


@pytest.mark.parametrize(
    ("name", "model_type", "said"),
    [
        ("InformerForPrediction", "informer", "InformerForPrediction takes"),
        (
            "TimesFm2_5ModelForPrediction",
            "timesfm2_5",
            "TimesFm2_5ModelForPrediction takes past_values of any",
        ),
        ("SamHQModel", "sam_hq", "SamHQModel takes pixel_values, input_points"),
        ("Blip2Model", "blip-2", "Blip2Model has a tower for texts and one for images"),
        ("OneFormerForUniversalSegmentation", "oneformer", "OneFormerForUniversalSegmentation"),
        ("WavLMForXVector", "wavlm", "ties the frames"),
    ],
)
def test_architectures_with_unsupported_inputs_are_refused_by_name(
    name: str, model_type: str, said: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": model_type}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InferError, match=said):
        load(Plan(source=str(tmp_path), data="random"))
