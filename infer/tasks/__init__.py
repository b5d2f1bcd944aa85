"""Answers of tasks: labels, entities, spans, boxes, masks and text, from what a model computes.

It needs NumPy and no torch, so that the server answers with it outside the processes that run the models.
"""
