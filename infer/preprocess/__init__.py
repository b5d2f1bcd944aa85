"""Preprocessing that travels with an artifact: image and sound files to the tensors that a model takes.

It needs NumPy, and Pillow for images. The parameters are read from a model's folder by `infer/load/hf_preprocessor.py`,
which also checks that both give the same tensors; a processor that does more than these steps is run by transformers
itself (`transformers_processor.py`).
"""
