"""Artifacts `NAME.infer/`: files, manifest, golden inputs, publication and verification."""
