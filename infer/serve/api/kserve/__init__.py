"""Requests and responses of KServe v2 inference."""
