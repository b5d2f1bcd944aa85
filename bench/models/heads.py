"""Heads of the models table: encoders and other models with the heads that people publish.

Columns: the folder opens with its task; the outputs equal those of transformers; int8:weight and nf4 pass their gate;
the artifact is served. Models are tiny, random and scaled so that their outputs vary; inputs are random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bench.models.checks import NONE, WORKS, Cell, Cells, ask_server, attempt

TITLE = "Heads"
COLUMNS = ("opens", "equals transformers", "int8:weight", "nf4", "served")
TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 96,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
STAGES: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
SOUND: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 24,
    "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32,
}  # fmt: skip
DEBERTA = {
    **TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "max_relative_positions": -1, "type_vocab_size": 0,
}  # fmt: skip
DISTIL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 96,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
BART: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 64, "num_layers": 1, "num_heads": 4, "d_kv": 16, "d_ff": 96, "vocab_size": 96,
    "decoder_start_token_id": 0,
}  # fmt: skip
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("bert", "Bert", TEXT),
    "RoBERTa": ("roberta", "Roberta", {**TEXT, "pad_token_id": 1, "type_vocab_size": 1}),
    "DeBERTa-v3": ("deberta-v2", "DebertaV2", {**DEBERTA, "position_buckets": 16, "share_att_key": True}),
    "ModernBERT": ("modernbert", "ModernBert", {**TEXT, "local_attention": 8}),
    "MPNet": ("mpnet", "MPNet", {**TEXT, "pad_token_id": 1}),
    "DistilBERT": ("distilbert", "DistilBert", DISTIL),
    "ELECTRA": ("electra", "Electra", {**TEXT, "embedding_size": 64}),
    "ALBERT": ("albert", "Albert", {**TEXT, "embedding_size": 32}),
}
CHOOSERS = ("BERT", "RoBERTa", "DeBERTa-v3", "ModernBERT")  # with rows of multiple choice
TEXT_HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM")


class Headed(NamedTuple):
    """Configuration of an architecture, and the class of transformers with the head."""

    config: str
    model: str
    sizes: dict[str, Any]
    inputs: tuple[str, ...] = ()  # as --input gives them, where the configuration does not tell

    def build(self) -> nn.Module:
        """Build the model with random weights."""
        import transformers

        labels = 2 if self.model.endswith("QuestionAnswering") else 3
        settings = transformers.AutoConfig.for_model(self.config, **self.sizes, num_labels=labels)
        made: nn.Module = getattr(transformers, self.model)(settings).eval()
        for parameter in made.parameters():
            if parameter.dim() > 1 and len(parameter):
                nn.init.normal_(parameter, std=1.2 / max(1, parameter[0].numel()) ** 0.5)
        if self.model.endswith("MaskedLM"):
            _peak(made)
        return made


def _peak(model: Any) -> None:
    """Give a masked language model logits as peaked as trained ones: random ones are nearly flat over the vocabulary.

    Embeddings are large beside what the layers add, and the layers between encoder and output, which has the rows of
    the embedding, keep the token that they get.
    """
    outside = dict(model.named_modules())
    for name in dict(model.base_model.named_modules(prefix=model.base_model_prefix)):
        outside.pop(name, None)
    output = model.get_output_embeddings()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter is not output.weight:
                parameter.mul_(0.4)
        for name, layer in model.named_modules():
            is_map = name in outside or name.endswith("embedding_hidden_mapping_in")
            if isinstance(layer, nn.Linear) and layer is not output and is_map:
                layer.weight.mul_(0.25).add_(torch.eye(*layer.weight.shape))


ENTRIES: dict[str, Headed] = {
    **{
        f"{name}, {head}": Headed(config, f"{prefix}For{head}", sizes)
        for name, (config, prefix, sizes) in ENCODERS.items()
        for head in TEXT_HEADS
    },
    **{
        f"{name}, MultipleChoice": Headed(config, f"{prefix}ForMultipleChoice", sizes)
        for name, (config, prefix, sizes) in ENCODERS.items()
        if name in CHOOSERS
    },
    "BART, SequenceClassification": Headed("bart", "BartForSequenceClassification", BART),
    "BART, QuestionAnswering": Headed("bart", "BartForQuestionAnswering", BART),
    "T5, SequenceClassification": Headed("t5", "T5ForSequenceClassification", T5),
    "BERT, NextSentencePrediction": Headed("bert", "BertForNextSentencePrediction", TEXT),
    "DPR, question encoder": Headed("dpr", "DPRQuestionEncoder", TEXT),
    "Whisper, audio classification": Headed(
        "whisper", "WhisperForAudioClassification",
        {**BART, "num_mel_bins": 16, "max_source_positions": 32, "classifier_proj_size": 32},
    ),
    "Wav2Vec2-BERT, CTC": Headed("wav2vec2-bert", "Wav2Vec2BertForCTC", {**SOUND, "feature_projection_input_dim": 160}),
    "LeViT, ImageClassification": Headed(
        "levit", "LevitForImageClassification",
        {
            "image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "ViT, ImageClassification": Headed("vit", "ViTForImageClassification", IMAGE),
    "ViT, features": Headed("vit", "ViTModel", IMAGE),
    "DeiT, ImageClassification": Headed("deit", "DeiTForImageClassification", IMAGE),
    "BEiT, ImageClassification": Headed("beit", "BeitForImageClassification", IMAGE),
    "DINOv2, ImageClassification": Headed("dinov2", "Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 2}),
    "DINOv2, features": Headed("dinov2", "Dinov2Model", {**IMAGE, "mlp_ratio": 2}),
    "DINOv3, features": Headed("dinov3_vit", "DINOv3ViTModel", IMAGE),
    "ConvNeXt, ImageClassification": Headed("convnext", "ConvNextForImageClassification", {**STAGES, "image_size": 64}),
    "Swin, ImageClassification": Headed(
        "swin", "SwinForImageClassification",
        {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4},
    ),
    "ResNet, ImageClassification": Headed(
        "resnet", "ResNetForImageClassification", {**STAGES, "embedding_size": 16, "layer_type": "basic"},
        ("pixel_values=float32[batch,3,64,64]",),
    ),
    "SegFormer, SemanticSegmentation": Headed(
        "segformer", "SegformerForSemanticSegmentation",
        {**STAGES, "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32},
        ("pixel_values=float32[batch,3,64,64]",),
    ),
    "YOLOS, ObjectDetection": Headed(
        "yolos", "YolosForObjectDetection", {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 6}
    ),
    "Wav2Vec2, CTC": Headed("wav2vec2", "Wav2Vec2ForCTC", SOUND),
    "Wav2Vec2, audio classification": Headed("wav2vec2", "Wav2Vec2ForSequenceClassification", SOUND),
    "HuBERT, CTC": Headed("hubert", "HubertForCTC", SOUND),
    "HuBERT, audio classification": Headed("hubert", "HubertForSequenceClassification", SOUND),
    "WavLM, CTC": Headed("wavlm", "WavLMForCTC", SOUND),
    "WavLM, audio classification": Headed("wavlm", "WavLMForSequenceClassification", SOUND),
    "Data2Vec, CTC": Headed("data2vec-audio", "Data2VecAudioForCTC", {**SOUND, "conv_pos_kernel_size": 3}),
    "UniSpeech-SAT, CTC": Headed("unispeech-sat", "UniSpeechSatForCTC", SOUND),
    "SEW, CTC": Headed("sew", "SEWForCTC", {**SOUND, "conv_dim": [16] * 13, "squeeze_factor": 2}),
    "AST, audio classification": Headed(
        "audio-spectrogram-transformer", "ASTForAudioClassification",
        {**IMAGE, "num_mel_bins": 32, "max_length": 64, "patch_size": 16},
    ),
    "DETR, ObjectDetection": Headed(
        "detr", "DetrForObjectDetection",
        {
            "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_queries": 6,
            "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        },
        ("pixel_values=float32[batch,3,64,64]",),
    ),
    "CLIP, both towers": Headed("clip", "CLIPModel", {}),
    "SigLIP, both towers": Headed("siglip", "SiglipModel", {}),
}  # fmt: skip


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row, cheapest first."""
    torch.manual_seed(0)
    model = _tiny(ENTRIES[name])
    model.save_pretrained(folder / "model")
    artifact = folder / "float.infer"
    task = list[str]()
    made = attempt(lambda: task.append(_optimize(ENTRIES[name], folder, artifact, "none")))  # type: ignore[func-returns-value]
    yield "opens", Cell(made.outcome, task[0] if task else made.why)
    if made.outcome != WORKS:
        for column in COLUMNS[1:]:
            yield column, Cell(NONE, "not opened")
        return
    yield "equals transformers", attempt(lambda: _equals(model, artifact))
    for quant in ("int8:weight", "nf4"):
        small = folder / f"{quant[:3]}.infer"
        yield quant, attempt(lambda q=quant, s=small: _compressed(ENTRIES[name], folder, s, q))  # type: ignore[misc]
    yield "served", attempt(lambda: _served(artifact))


def _tiny(entry: Headed) -> Any:
    if entry.config == "detr":
        from transformers import ResNetConfig

        backbone = ResNetConfig(embedding_size=16, out_features=["stage4"], **STAGES)
        return entry._replace(sizes={**entry.sizes, "backbone_config": backbone}).build()
    if entry.config not in ("clip", "siglip"):
        return entry.build()
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tiny, "image_size": 32, "patch_size": 16}
    return entry._replace(sizes={"text_config": {**tiny, "vocab_size": 64}, "vision_config": vision}).build()


def _optimize(entry: Headed, folder: Path, artifact: Path, quant: str) -> str:
    from infer import Plan, optimize

    given = {"backend": "eager", "quant": quant, "batches": (), "allow_slower": True, "max_length": 32}
    plan = Plan(source=str(folder / "model"), data="random", inputs=entry.inputs, **given)  # type: ignore[arg-type]
    optimize(plan, artifact)
    from infer.artifact import store

    return store.read_manifest(artifact).task


def _compressed(entry: Headed, folder: Path, artifact: Path, quant: str) -> str | None:
    _optimize(entry, folder, artifact, quant)
    return None


def _inputs(predictor: Any) -> dict[str, np.ndarray]:
    """Draw two rows for the inputs of an artifact: tokens, pixels or samples; the second is padded where masked."""
    generator = np.random.default_rng(0)
    sizes = {"batch": 2, "seq": 12, "samples": 4000, "images": 2, "texts": 3}
    for name, (low, high) in predictor.sizes.items():
        sizes[name] = min(max(sizes.get(name, low), low), high)
    sizes["batch"] = 2  # rows run one by one where the batch is fixed
    found = {}
    for spec in predictor.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        if spec.dtype == "float32":
            found[spec.name] = generator.standard_normal(shape).astype(np.float32)
        elif "mask" in spec.name:
            found[spec.name] = np.ones(shape, np.int64)
            found[spec.name][1, shape[1] // 2 :] = 0
        else:
            found[spec.name] = (
                generator.integers(3, 64, shape) if spec.name == "input_ids" else np.zeros(shape, int)
            )
    end = (predictor.manifest.meta or {}).get("eos_id")
    if "input_ids" in found and isinstance(
        end, int
    ):  # classifiers over encoder-decoders read the state there
        ids = found["input_ids"]
        ids[0, -1] = ids[1:, ids.shape[1] // 2 - 1] = end
    return found


def _equals(model: Any, artifact: Path) -> None:
    from infer import Predictor

    with Predictor.load(artifact) as predictor, torch.no_grad():
        inputs = _inputs(predictor)
        got = predictor.predict(inputs)
        given = {name: torch.from_numpy(value) for name, value in inputs.items()}
        if type(model).__name__.endswith("ForMultipleChoice"):  # one choice a question
            given = {name: value[:, None] for name, value in given.items()}
        expected = model(**given)
        for name, value in got.items():
            theirs = expected.pooler_output.flatten(1) if name == "embedding" else expected.get(name)
            theirs = expected.logits_per_image if theirs is None else theirs
            np.testing.assert_allclose(value, theirs.numpy(), rtol=1e-4, atol=1e-4)


def _served(artifact: Path) -> None:
    from infer import Predictor

    with Predictor.load(artifact) as predictor:
        inputs, specs = _inputs(predictor), predictor.inputs
        expected = predictor.predict(inputs)
    tensors = [
        {
            "name": spec.name,
            "datatype": {"float32": "FP32", "int64": "INT64"}[spec.dtype],
            "shape": list(inputs[spec.name].shape),
            "data": inputs[spec.name].reshape(-1).tolist(),
        }
        for spec in specs
    ]
    answer = ask_server(artifact, f"/v2/models/{artifact.stem}/infer", {"inputs": tensors})
    for output in answer["outputs"]:
        value = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_allclose(value, expected[output["name"]], rtol=1e-4, atol=1e-4)
