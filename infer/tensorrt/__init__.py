"""TensorRT and TensorRT-RTX: engines built from an exported graph, and run."""
