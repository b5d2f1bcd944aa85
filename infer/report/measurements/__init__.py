"""Measurements of a report: memory, peak memory, roofline, profile, steps of a decode."""
