"""One file per protocol; its name is its name. A file defines `routes(service) -> list[Route]`.

`Route`, `Dialect`, `Call` and `Reply` stand in `infer.serve.http.routing`. A handler takes the `Call`, raises
`InferError`s and returns what its route promises: the `Out` struct, text, or a whole `Reply`.
"""
