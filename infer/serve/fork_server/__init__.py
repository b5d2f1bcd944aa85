"""Work whose length a client or an artifact decides (grammars, templates, tokenizers), in processes that can be killed.

For each language model the front starts one fork server, which opens the tokenizer once and then only forks: a child
costs milliseconds, is warm, and shares the tokenizer's memory. `server.ForkServer` is the front's side.
"""
