"""One file per protocol, named after it; each defines `routes(service) -> list[Route]`.

`Route`, `ErrorFormat` and `Response` are defined in `infer.serve.http.routing`. A handler takes a `RequestContext` (of
`infer.serve.http.request_context`), raises `InferError`s and returns what its route declares: the `Out` struct, text,
or a whole `Response`.
"""
