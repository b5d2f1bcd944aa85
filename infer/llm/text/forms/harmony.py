"""gpt-oss: messages with a channel: `analysis` of thoughts, `commentary to=functions.NAME` of a call, `final`."""

from __future__ import annotations

from ..calls.objects import ChannelCalls
from . import Form, Thought

FORM = Form(
    shown_by=(r"<\|channel\|>", r"<\|message\|>"),
    opening=("<|start|>", "<|channel|>"),
    syntaxes=(ChannelCalls(),),
    markup=("<|end|>", "<|call|>", "<|return|>"),
    separator="<|start|>assistant",
    thought=Thought("<|channel|>analysis<|message|>", "<|end|>"),
    answer="<|channel|>final<|message|>",
    most=1,
)
