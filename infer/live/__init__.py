"""Models in memory: a module of the user's program becomes a verified, faster callable in its place.

compile(model, data)            a callable that takes and returns what the model did
record(module, …)               the calls of modules inside a running program
replace(program, calls)         verified modules in their place; `restore` takes them out
"""
