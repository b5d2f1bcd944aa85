"""Options of `infer distil`: teacher, student, loss and data."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...options import Option
from ..settings import DATA, HeldOutShare, RowLength
from .student_shape import FORMS

STUDENT = "Student"
WEIGHTS = "student.pt"  # of a module of the user's, in the output


class DistilSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher, its student, what the student learns from it, and the data; a frozen struct."""

    source: Annotated[
        str, Option("the teacher: anything that infer optimize takes", flag="", metavar="TEACHER")
    ]
    student: Annotated[
        str,
        Option(
            f"{FORMS}: made of the teacher's weights; or a Hugging Face folder; or FILE.py:FACTORY",
            group=STUDENT,
            metavar="STUDENT",
        ),
    ]
    data: Annotated[
        str,
        Option(
            "inputs without labels: text, JSON lines or chats for a language model, else as for infer optimize",
            group=DATA,
            metavar="PATH",
            path=True,
        ),
    ]
    model: Annotated[
        str | None,
        Option(
            "FILE.py:FACTORY of a teacher that is a file of weights", group=STUDENT, metavar="FILE.py:FACTORY"
        ),
    ] = None
    trust_code: Annotated[bool, Option("open a teacher that can run code", group=STUDENT, one_way=True)] = (
        False
    )
    temperature: Annotated[
        float, Option("divisor of both models' logits in the loss", group=STUDENT, above=0)
    ] = 1.0
    hard: Annotated[
        float,
        Option(
            "share of the loss that is the next token of the text itself (language models)",
            group=STUDENT,
            minimum=0,
            maximum=1,
        ),
    ] = 0.0
    hidden: Annotated[
        float,
        Option(
            "weight of the error of hidden states, for a student made of its teacher",
            group=STUDENT,
            minimum=0,
        ),
    ] = 0.1
    length: RowLength = None
    held_out: HeldOutShare = 0.05
