"""The pipeline from a source to a published artifact."""
