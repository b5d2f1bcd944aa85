"""Tiny configurations of encoders and other models with the heads that people publish, for the models table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

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
IMAGE64 = ("pixel_values=float32[batch,3,64,64]",)
DETR: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_queries": 6, "use_timm_backbone": False,
    "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip
RT_DETR: dict[str, Any] = {
    "encoder_hidden_dim": 32, "encoder_in_channels": [32, 48, 64], "encoder_layers": 1, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_in_channels": [32, 32, 32], "d_model": 32, "decoder_layers": 1,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_queries": 6, "num_denoising": 0, "decoder_n_points": 2,
}  # fmt: skip
DEPTH: dict[str, Any] = {
    **IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 16,
}  # fmt: skip
SERIES: dict[str, Any] = {
    "num_input_channels": 2, "context_length": 64, "patch_length": 8, "patch_stride": 8, "d_model": 64, "ffn_dim": 96,
    "num_attention_heads": 4, "num_hidden_layers": 1, "prediction_length": 8, "loss": "mse", "num_layers": 2,
    "expansion_factor": 2,
}  # fmt: skip
MASKS: dict[str, Any] = {
    "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_layers": 1, "decoder_layers": 2,
    "num_attention_heads": 4, "encoder_feedforward_dim": 48, "dim_feedforward": 64, "num_queries": 6,
}  # fmt: skip
FOUR_STAGES = ["stage1", "stage2", "stage3", "stage4"]
# Configurations of parts that a configuration holds: class of transformers, sizes.
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "detr": ("ResNetConfig", {"embedding_size": 16, "out_features": ["stage4"], **STAGES}),
    "depth_anything": (
        "Dinov2Config",
        {**IMAGE, "mlp_ratio": 2, "num_hidden_layers": 4, "out_features": FOUR_STAGES, "reshape_hidden_states": False},
    ),
    "upernet": ("ConvNextConfig", {**STAGES, "out_features": FOUR_STAGES}),
    "mask2former": (
        "SwinConfig",
        {
            "embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 4, "image_size": 64,
            "out_features": FOUR_STAGES,
        },
    ),
    "rt_detr": (
        "RTDetrResNetConfig",
        {**STAGES, "embedding_size": 16, "layer_type": "basic", "out_features": FOUR_STAGES[1:]},
    ),
}  # fmt: skip
BACKBONES |= {
    "conditional_detr": BACKBONES["detr"],
    "table-transformer": BACKBONES["detr"],
    "maskformer": BACKBONES["mask2former"],
}
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
        "detr", "DetrForObjectDetection", DETR, IMAGE64,
    ),
    "CLIP, both towers": Headed("clip", "CLIPModel", {}),
    "SigLIP, both towers": Headed("siglip", "SiglipModel", {}),
    "Conditional DETR, ObjectDetection": Headed(
        "conditional_detr", "ConditionalDetrForObjectDetection", DETR, IMAGE64
    ),
    "Table Transformer, ObjectDetection": Headed(
        "table-transformer", "TableTransformerForObjectDetection", DETR, IMAGE64
    ),
    "RT-DETR, ObjectDetection": Headed("rt_detr", "RTDetrForObjectDetection", RT_DETR, IMAGE64),
    "BEiT, SemanticSegmentation": Headed(
        "beit", "BeitForSemanticSegmentation",
        {**IMAGE, "num_hidden_layers": 4, "image_size": 64, "out_indices": [0, 1, 2, 3]},
    ),
    "UperNet, SemanticSegmentation": Headed(
        "upernet", "UperNetForSemanticSegmentation",
        {"hidden_size": 16, "auxiliary_channels": 16, "auxiliary_in_channels": 48, "backbone": None}, IMAGE64,
    ),
    "Mask2Former, UniversalSegmentation": Headed(
        "mask2former", "Mask2FormerForUniversalSegmentation", MASKS, IMAGE64
    ),
    "MaskFormer, InstanceSegmentation": Headed("maskformer", "MaskFormerForInstanceSegmentation", {}, IMAGE64),
    "DPT, DepthEstimation": Headed("dpt", "DPTForDepthEstimation", DEPTH),
    "Depth Anything, DepthEstimation": Headed(
        "depth_anything", "DepthAnythingForDepthEstimation",
        {
            "patch_size": 8, "reassemble_hidden_size": 64, "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16, "backbone": None,
        },
        ("pixel_values=float32[batch,3,32,32]",),
    ),
    "GLPN, DepthEstimation": Headed(
        "glpn", "GLPNForDepthEstimation",
        {**STAGES, "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 16}, IMAGE64,
    ),
    "Swin2SR, ImageSuperResolution": Headed(
        "swin2sr", "Swin2SRForImageSuperResolution",
        {"image_size": 32, "embed_dim": 32, "depths": [1], "num_heads": [2], "window_size": 4},
    ),
    "VideoMAE, VideoClassification": Headed(
        "videomae", "VideoMAEForVideoClassification", {**IMAGE, "num_frames": 4}
    ),
    "TimeSformer, VideoClassification": Headed(
        "timesformer", "TimesformerForVideoClassification", {**IMAGE, "num_frames": 2}
    ),
    "Wav2Vec2, features": Headed("wav2vec2", "Wav2Vec2Model", SOUND),
    "HuBERT, features": Headed("hubert", "HubertModel", SOUND),
    "WavLM, XVector": Headed(
        "wavlm", "WavLMForXVector", {**SOUND, "tdnn_dim": [32] * 3, "tdnn_kernel": [3] * 3, "tdnn_dilation": [1] * 3}
    ),
    "Wav2Vec2, XVector": Headed(
        "wav2vec2",
        "Wav2Vec2ForXVector",
        {**SOUND, "tdnn_dim": [32] * 3, "tdnn_kernel": [3] * 3, "tdnn_dilation": [1] * 3},
    ),
    "Wav2Vec2, AudioFrameClassification": Headed("wav2vec2", "Wav2Vec2ForAudioFrameClassification", SOUND),
    "CLAP, tower of sound": Headed(
        "clap_audio_model", "ClapAudioModelWithProjection",
        {
            "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "window_size": 4,
            "spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "hidden_size": 32,
            "projection_dim": 32, "aff_block_r": 4,
        },
    ),
    "PatchTST, forecast": Headed("patchtst", "PatchTSTForPrediction", SERIES),
    "PatchTST, classification": Headed(
        "patchtst", "PatchTSTForClassification", {**SERIES, "num_targets": 3, "use_cls_token": True}
    ),
    "PatchTSMixer, forecast": Headed("patchtsmixer", "PatchTSMixerForPrediction", SERIES),
    "LayoutLM, TokenClassification": Headed("layoutlm", "LayoutLMForTokenClassification", TEXT),
    "LayoutLMv3, TokenClassification": Headed(
        "layoutlmv3", "LayoutLMv3ForTokenClassification",
        {**TEXT, "input_size": 32, "patch_size": 16, "coordinate_size": 8, "shape_size": 16},
    ),
    "LiLT, TokenClassification": Headed(
        "lilt", "LiltForTokenClassification", {**TEXT, "hidden_size": 96, "pad_token_id": 1}
    ),
    "BigBird, SequenceClassification": Headed(
        "big_bird", "BigBirdForSequenceClassification", {**TEXT, "block_size": 8}
    ),
    "Longformer, SequenceClassification": Headed(
        "longformer", "LongformerForSequenceClassification", {**TEXT, "pad_token_id": 1, "attention_window": 8}
    ),
    "Longformer, MaskedLM": Headed(
        "longformer", "LongformerForMaskedLM", {**TEXT, "pad_token_id": 1, "attention_window": 8}
    ),
    "ESM, MaskedLM": Headed("esm", "EsmForMaskedLM", {**TEXT, "pad_token_id": 1, "mask_token_id": 2}),
    "BERT, PreTraining": Headed("bert", "BertForPreTraining", TEXT),
    "Wav2Vec2, PreTraining": Headed(
        "wav2vec2", "Wav2Vec2ForPreTraining", {**SOUND, "codevector_dim": 32, "proj_codevector_dim": 32}
    ),
    "ELECTRA, PreTraining": Headed("electra", "ElectraForPreTraining", {**TEXT, "embedding_size": 64}),
    "T5, encoder": Headed("t5", "T5EncoderModel", T5),
    "T5, TokenClassification": Headed("t5", "T5ForTokenClassification", T5),
    "Chinese-CLIP, both towers": Headed("chinese_clip", "ChineseCLIPModel", {}),
    "SuperPoint, KeypointDetection": Headed(
        "superpoint", "SuperPointForKeypointDetection",
        {
            "encoder_hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 32, "keypoint_decoder_dim": 65,
            "descriptor_decoder_dim": 32,
        },
        ("pixel_values=float32[2,3,64,64]",),
    ),
}  # fmt: skip


def tiny(entry: Headed) -> Any:
    """Build the model of an entry, with the configurations of its parts where it has several."""
    if entry.config in BACKBONES:
        import transformers

        name, sizes = BACKBONES[entry.config]
        backbone = getattr(transformers, name)(**sizes)
        return entry._replace(sizes={**entry.sizes, "backbone_config": backbone}).build()
    if entry.config not in ("clip", "siglip", "chinese_clip"):
        return entry.build()
    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tiny, "image_size": 32, "patch_size": 16}
    return entry._replace(sizes={"text_config": {**tiny, "vocab_size": 64}, "vision_config": vision}).build()
