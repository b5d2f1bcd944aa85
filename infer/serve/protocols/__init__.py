"""One file per protocol, named after it; each defines `routes(service) -> list[Route]`.

`Route`, `ErrorFormat`, `RequestContext` and `Response` are defined in `infer.serve.http.routing`. A handler takes
the context, raises `InferError`s and returns what its route declares: the `Out` struct, text, or a whole
`Response`.
"""
