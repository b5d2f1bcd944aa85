"""Trials of a search in a process of their own: the process, what runs in it, and the messages between both."""
