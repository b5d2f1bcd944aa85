"""Memory of training: frozen layers that stay packed, activation checkpointing, offload, and the plan of it all."""
