"""Language models: the captured step, its paged KV cache, and the engine that schedules sequences on it."""
