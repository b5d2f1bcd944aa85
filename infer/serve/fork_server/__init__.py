"""Tokenizer, template and grammar work with unbounded cost, in processes that can be killed.

For each language model the server starts one fork server, which opens the tokenizer once and then only forks:
a child starts in milliseconds, is warm, and shares the tokenizer's memory. `client.ForkServer` is the
server's side, `children` what a forked process does. (`infer.serve.workers` run models instead: each lives as long as
the server, has its own memory, and is restarted when it dies.)
"""
