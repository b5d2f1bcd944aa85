"""Models table: every architecture, head and checkpoint format, and what `infer` does with it."""
