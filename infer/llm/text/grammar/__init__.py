"""Structured output: constraints of a request, compiled to masks over the vocabulary."""
