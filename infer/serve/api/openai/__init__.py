"""Requests and responses of OpenAI's text API: completions and chat."""
