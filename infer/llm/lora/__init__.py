"""LoRA adapters: their configuration, their weights and their part of the step."""
