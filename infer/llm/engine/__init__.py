"""The engine: scheduler, block manager, model runner, sampler and the state of each sequence."""
