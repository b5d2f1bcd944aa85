"""Calibration: scales, SmoothQuant, GPTQ error feedback, searched on real inputs."""
