"""Loading of weights into a model on the meta device, by one of two strategies."""
