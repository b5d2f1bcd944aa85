"""Models that no task here fits, each with the one thing that is missing."""

from __future__ import annotations

from ..errors import NotUsableError
from . import Family, Refusal

# Text towers trained beside images or sound; pooled by their own last or first token, never by a mean.
_TOWERS = "CLIP|MetaClip2|ChineseCLIP|AltCLIP|CLIPSeg|Siglip2|OwlViT|Owlv2|GroupViT|Clap|Flava|Align"

FAMILY = Family(
    refused={
        f"({_TOWERS})TextModel": Refusal(
            "has no projection: its hidden states are not the embedding that images are compared with",
            hint="Save {name}WithProjection, where transformers has it, or give --model file.py:factory that returns "
            "the pooled output",
        ),
        r"Pix2Struct\w*": Refusal(
            "reads patches of an image, as many as fit, below a question that is drawn into it; infer's encoders of "
            "images read one size, and nothing here draws text"
        ),
        r"VitsModel|SpeechT5ForTextToSpeech|FastSpeech2Conformer(Model|WithHifiGan)|Bark\w*Model|"
        r"(Musicgen|MusicgenMelody|Csm|Dia|HiggsAudioV2)ForConditionalGeneration": Refusal(
            "makes sound; infer has no task whose output is sound"
        ),
        "WavLMForXVector": Refusal(
            "can't be captured: torch.export ties the frames of its sounds to the size of the batch",
            hint="Its base model (WavLMModel) opens, as does Wav2Vec2ForXVector",
            error=NotUsableError,
        ),
    }
)
