"""Sampling of tokens: options, penalties, rules on logits, samplers, log probabilities."""
