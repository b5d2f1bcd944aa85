"""Scheduling: admission, limits, fair shares, and the tokens of each step."""
