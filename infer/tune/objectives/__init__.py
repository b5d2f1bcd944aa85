"""Objectives of training: next tokens, and the outputs of a teacher."""
