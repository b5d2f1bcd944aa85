"""Model worker processes: their entry point, supervision, and messages.

The server process (HTTP, queue, deadlines, metrics) starts `python -m infer.serve.workers` with one end of a
socket pair and some shared memory, all as inherited descriptors: nothing has a name in the file system, and
nothing is left when both have ended. `messages` cross the socket as length-prefixed msgpack; tensors are
placed in `shared_memory`. The server's side of a model is a `Replica` (tensors) or a `RemoteEngine` (language
model); the worker's side is one of the `loops`.
"""
