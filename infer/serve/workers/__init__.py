"""A process per model replica: what runs in it, how it is started and watched, and what crosses over.

The front process (HTTP, queue, deadlines, metrics) starts `python -m infer.serve.workers` with one end of a socket pair
and some shared memory, all as inherited descriptors: nothing has a name, and nothing is left when both have ended.
`messages` cross the pair as length-prefixed msgpack, tensors cross in `slab`s. The front's side of a model is a
`Replica` (tensors) or a `RemoteDriver` (text); the worker's are `tensors` and `language`.
"""
