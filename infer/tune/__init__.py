"""Training: adapters, recovery of quantized weights and distillation, through one loop."""
