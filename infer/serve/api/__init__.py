"""Dialects of the server: a file or folder for each, which holds its types, routes and handlers.

A dialect is a plug-in, named after its file, and defines `routes(service) -> list[Route]`. `Route`, `ErrorFormat` and
`Response` are defined in `infer.serve.http.routing`. A handler takes a `RequestContext` (of
`infer.serve.http.request_context`), raises `InferError`s and returns what its route declares: the `Out` struct, text,
or a whole `Response`.
"""
