"""Texts for tensor models: embedding, reranking, scoring, classification, spans."""
