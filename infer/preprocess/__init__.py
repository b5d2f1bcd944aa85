"""Preprocessing that travels with an artifact: image and sound files to the tensors that a model takes.

It needs NumPy, and Pillow for images; never transformers. The parameters are read from a model's folder by
`infer/load/processors.py`, which also checks that both give the same tensors.
"""
