"""Opened artifacts: `predictor.py` has the class, `tasks` of texts, images and sounds lie beside it."""
