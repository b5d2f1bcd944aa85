"""Layers over a state cache: causal convolution, gated delta rule, Mamba, linear recurrence."""
