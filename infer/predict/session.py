"""Session: calls of one sequence, each of which gets the state that the one before returned."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from ..errors import InputError, UsageError


class Session:
    """Calls of one sequence of a stateful model, from zeros on; safe to call from many threads.

        with predictor.session({"sr": np.array(16000)}) as session:
            for piece in pieces:
                speech = session.predict({"input": piece})["output"]

    Calls of one session run one after another, in the order in which they come; other sessions do not wait for them.
    A call that raises leaves the state as it was.
    """

    def __init__(self, predictor: Any, shared: Mapping[str, Any] | None = None) -> None:
        self._predictor, self._shared = predictor, dict(shared or {})
        self._lock = threading.Lock()
        self._state: dict[str, Tensor] = {}
        self._closed = False
        if unknown := sorted(set(self._shared) - {spec.name for spec in predictor.inputs}):
            raise UsageError(f"no input named {unknown[0]!r}", where="session")

    def predict(self, inputs: Any) -> Any:
        """Run one call as `Predictor.predict` does; states are left out of `inputs`.

        Raises `InputError` for a state among `inputs` or rows of another number than the state has, and `UsageError`
        after `close`.
        """
        predictor = self._predictor
        with self._lock:
            if self._closed:
                raise UsageError("this session is closed", hint="Begin another one with Predictor.session()")
            named = {**self._shared, **predictor.named(inputs, self._shared)}
            if given := sorted(set(named) & set(predictor.states)):
                raise InputError(
                    f"the session carries the state {given[0]!r}",
                    where="request.inputs",
                    hint="Leave it out, begin another session, or go on from a state with `restore`",
                )
            outputs = predictor.run_checked({**named, **self._state})
            self._state = {name: outputs[source].clone() for name, source in predictor.states.items()}
        as_torch = any(isinstance(value, Tensor) for value in named.values())
        return {name: value if as_torch else value.numpy() for name, value in outputs.items()}

    @property
    def state(self) -> dict[str, Tensor]:
        """A copy of the state by input, which `restore` takes; empty before the first call."""
        with self._lock:
            return {name: value.clone() for name, value in self._state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from an earlier `state`. Raises `InputError` for another set of states."""
        if state and set(state) != set(self._predictor.states):
            raise InputError(
                f"expected the states {', '.join(self._predictor.states)}, got {', '.join(state)}"
            )
        with self._lock:
            self._state = {name: value.clone() for name, value in state.items()}

    def reset(self) -> None:
        """Begin again with zeros."""
        self.restore({})

    def close(self) -> None:
        """Free the state; calls after this raise `UsageError`. The predictor stays open."""
        with self._lock:
            self._closed, self._state = True, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
