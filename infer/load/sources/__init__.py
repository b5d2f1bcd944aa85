"""Kinds of sources: folders of Hugging Face, state dicts, exported programs, TorchScript, ONNX, Python code."""
