"""LoRA and QLoRA: adapters of PEFT's format over a float or packed base."""
