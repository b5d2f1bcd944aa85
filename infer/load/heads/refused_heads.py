"""Architectures that no task here fits, each with the one thing that is missing."""

from __future__ import annotations

import re

# Pattern of an architecture's name → what is missing.
REFUSED = {
    r"Pix2Struct\w*": "reads patches of an image, as many as fit, below a question that is drawn into it; infer's "
    "encoders of images read one size, and nothing here draws text",
    r"VitsModel|SpeechT5ForTextToSpeech|FastSpeech2Conformer(Model|WithHifiGan)|Bark\w*Model|"
    r"(Musicgen|MusicgenMelody|Csm|Dia|HiggsAudioV2)ForConditionalGeneration": "makes sound; infer has no task whose "
    "output is sound",
}


def missing_part(name: str) -> str | None:
    """Return what is missing for an architecture, None where nothing is known to be."""
    return next((said for pattern, said in REFUSED.items() if re.fullmatch(pattern, name)), None)
