"""Language models behind HTTP: token streams, the prompt queue and tokenizer processes."""
