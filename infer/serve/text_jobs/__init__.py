"""Work with unbounded cost on the texts and grammars that clients send, in processes that can be killed.

Each model with a tokenizer has a fork server (`infer.process.fork_server`): `__main__` is that process and what its
children do.
"""
