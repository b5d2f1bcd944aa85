"""Models of diffusers pipelines, each an artifact of its own: denoisers, image decoders and encoders, text encoders.

`part_inputs.py` says for each class which tensors it takes and gives, `open_part.py` joins a model with its weights.
"""
