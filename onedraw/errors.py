"""The exception tree. Every error that a user can cause has a class, a code for programs and a message that says what to do.

OnedrawError                 base class of all errors raised on purpose
├── BadRequest               the caller's mistake: 400, with `param` and `code`
│   ├── BadParameter         one parameter is out of range or unknown
│   ├── ContextOverflow      prompt + max_tokens exceed the context
│   ├── TextTooLong          a text that cannot fit into the context, found before it is tokenized
│   ├── Unsupported          this backend or build does not support the feature that the message names
│   ├── Conflict             another request of the same kind is running: 409
│   └── NoTokenLeft          the sampling parameters leave no token to sample
├── QueueFull                too many requests are waiting: 429
├── ShuttingDown             the server is shutting down: 503
├── EngineLost               the engine of a request failed or its process ended, and no other could continue the request: 503
├── NonFiniteLogits          the model's activations overflowed: 500; the message names a dtype that avoids it
├── StepFailed               an exception in an engine step: 500, with an id that is also in the log
├── ModelError               the checkpoint cannot be used
│   ├── ModelNotFound        no such model; the message says how to get it
│   ├── CorruptFile          a file is damaged or incomplete; the message names file and tensor
│   └── UnsupportedModel     names the architecture or config key, and lists what is supported
├── StateLost                the backend lost the state of all sequences and could not be restored: 503
├── OutOfMemory              not enough memory for one sequence or one step, or a full disk; the message says what to do
└── BadSetting               a flag or an environment variable is wrong
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OnedrawError(Exception):
    """Base of all errors raised on purpose. `code` is for programs, the message for people, `status` is the HTTP status, and
    `param` names the wrong request field."""

    code: str = "error"
    status: int = 500
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error by its content, so that it can cross processes although subclasses have other constructors."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[OnedrawError], args: tuple[Any, ...], state: dict[str, Any]) -> OnedrawError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class BadRequest(OnedrawError):
    code, status = "invalid_request", 400


class BadParameter(BadRequest):
    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)
        self._message = message

    def renamed(self, names: Mapping[str, str]) -> BadParameter:
        """Return a copy of the error that names the parameter as the caller did. A key of `names` may be the first part of a
        path."""
        param = self.param or ""
        head = next((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), None)
        return self if head is None else BadParameter(names[head] + param[len(head) :], self._message)


class ContextOverflow(BadRequest):
    """The prompt and max_tokens exceed the context. `prompt` is the number of prompt tokens."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str, prompt: int) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt


class TextTooLong(BadRequest):
    code = "context_length_exceeded"


class Unsupported(BadRequest):
    code = "unsupported"


class Conflict(BadRequest):
    code, status = "conflict", 409


class NoTokenLeft(BadRequest):
    code = "no_token_left"


class QueueFull(OnedrawError):
    code, status = "queue_full", 429


class ShuttingDown(OnedrawError):
    code, status = "shutting_down", 503


class EngineLost(OnedrawError):
    code, status = "engine_lost", 503


class NonFiniteLogits(OnedrawError):
    code, status = "not_finite", 500


class StepFailed(OnedrawError):
    code, status = "internal_error", 500


class ModelError(OnedrawError):
    code = "model_error"


class ModelNotFound(ModelError):
    code, status = "model_not_found", 404


class CorruptFile(ModelError):
    code = "corrupt_checkpoint"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class OutOfMemory(OnedrawError):
    code = "no_room"


class StateLost(OnedrawError):
    """A backend lost the state of all sequences. The engine computes them again, so no request ends with this error unless the
    backend cannot be restored."""

    code, status = "state_lost", 503


class BadSetting(OnedrawError):
    code = "bad_setting"
