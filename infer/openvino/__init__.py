"""OpenVINO: models converted from an exported graph, compiled for the CPU, and run."""
