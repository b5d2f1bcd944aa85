"""Requests and responses of the KServe and OpenAI protocols."""
