"""Metrics, logs, traces and the status page."""
