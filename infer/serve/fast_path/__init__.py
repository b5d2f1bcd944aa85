"""Fast path for KServe requests that repeat an earlier one in all but their numbers.

`coalescer.Coalescer` is the only way in. It implements `http_protocol.FastPath`, and nothing on the ordinary
path imports from this package: a server without it gives the same answers, with more work per request.
"""
