"""GGUF files, the format of llama.cpp: settings, tensors and tokenizer of a language model in one file."""
