"""Captured programs: `torch.export` results with named, typed, symbolically sized inputs and outputs."""
