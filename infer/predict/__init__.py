"""The Python API over an artifact: `predictor.Predictor` opens one; the other modules are its inputs and tasks."""
