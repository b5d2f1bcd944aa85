"""Measure and show: latency, memory, roofline, profile; as terminal text, JSON and one HTML file."""
