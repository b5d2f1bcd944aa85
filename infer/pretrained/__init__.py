"""Artifacts as models of transformers, by Optimum's conventions, and as modules of sentence-transformers.

`classes` has the table of the `InferModelFor…`, `model` what all of them do, `generating_model` those that write text.
"""
