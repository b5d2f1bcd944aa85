"""Nodes of the domain `infer` in ONNX graphs: how operators become them, and how a backend's rules rewrite them."""
