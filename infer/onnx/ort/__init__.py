"""ONNX Runtime: sessions, decode steps of language models, signedness of stored int8 weights."""
