"""The captured program: `torch.export` results with named, typed, symbolically sized inputs and outputs."""
