"""Text generation as every dialect asks for it: conversations, their replies in parts, and streams of events.

A dialect translates its request into a `Conversation`, and the parts of the `Reply` into its own body or events.
"""
