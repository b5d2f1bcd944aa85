"""Text around a language model: tokenizer, chat templates, stop strings, grammars and tool calls."""
