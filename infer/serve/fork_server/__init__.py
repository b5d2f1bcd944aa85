"""Work with unbounded cost on what clients send, in processes that can be killed.

A fork server opens what the work needs once and then only forks: a child starts in milliseconds, is warm, and shares
its memory. `client.ForkServer` is the server's side, `children` forks and kills. There is one for each language model,
with its tokenizer (`text_jobs` are what its children do), and one for files of images and sound
(`infer.serve.media_decoder`). (`infer.serve.workers` run models instead: each lives as long as the server, has its own
memory, and is restarted when it dies.)
"""
