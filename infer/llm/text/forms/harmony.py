"""gpt-oss: messages with a channel: `analysis` of thoughts, `commentary to=functions.NAME` of a call, `final`."""

from __future__ import annotations

from ..calls.objects import ChannelCalls
from . import Form, Thought

NEXT = "<|end|><|start|>assistant"

FORM = Form(
    shown_by=(r"<\|channel\|>", r"<\|message\|>"),
    opening=("<|start|>", "<|channel|>"),
    syntaxes=(ChannelCalls(),),
    markup=("<|end|>", "<|call|>", "<|return|>"),
    separator="<|start|>assistant",
    thought=Thought("<|channel|>analysis<|message|>", "<|end|>"),
    answer="<|channel|>final<|message|>",
    asides=(("<|channel|>analysis<|message|>", NEXT), ("<|channel|>commentary<|message|>", NEXT)),
    most=1,
)
