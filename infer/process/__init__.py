"""Child processes: how they are started, confined, spoken to and ended.

`spawn` is the parent's side of a process that starts afresh, `child` what such a process does first; `channel` carries
length-prefixed msgpack between both. A process that has opened what its work needs can fork instead of being started
again: `fork_server` asks for children and kills them, `forked_children` forks. Errors cross as `error_messages`.
"""
