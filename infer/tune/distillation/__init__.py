"""Distillation: a smaller student of the same outputs, taught by the teacher on data without labels."""
