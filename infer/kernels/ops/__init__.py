"""The operators `infer::*`: schema, slow reference and shape function of each."""
