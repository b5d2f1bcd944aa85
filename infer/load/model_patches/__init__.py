"""Changes to a loaded model before it is quantized or captured: MoE layers, computed positions, parts of a VLM."""
