"""The workload that language models are timed for."""

from __future__ import annotations

import msgspec


class Workload(msgspec.Struct, frozen=True):
    """The use that a language model is timed for, at each batch size of the plan: that many prompts of `prompt` tokens,
    read `chunk` tokens in a step, each answered by `answer` tokens. Dispatch sums a layer's time over it, the speed
    gate the model's.
    """

    prompt: int = 256
    answer: int = 128
    chunk: int = 256

    def steps(self, batch: int) -> dict[int, int]:
        """Tokens in a step → number of such steps."""
        whole, rest = divmod(batch * self.prompt, self.chunk)
        steps = {batch: self.answer}
        for tokens, count in ((self.chunk, whole), (rest, 1)):
            if tokens and count:
                steps[tokens] = steps.get(tokens, 0) + count
        return steps

    def logits(self, batch: int) -> dict[int, int]:
        """Tokens whose logits a step computes → number of such steps: of a prompt only its last token's."""
        return {batch: self.answer + 1}

    def __str__(self) -> str:
        return f"a prompt of {self.prompt} tokens and an answer of {self.answer}"


WORKLOAD = Workload()
