"""The exception tree. Every error a user can cause has a class, a code and a sentence that says what to do.

OnedrawError                 anything we say on purpose
├── BadRequest               the caller's mistake: 400, with `param` and `code`
│   ├── BadParameter         one parameter is out of range or unknown
│   ├── ContextOverflow      prompt + max_tokens over the context
│   └── Unsupported          a wish this backend or build cannot honour, by name
├── NoTokenLeft                   the law left no token to choose
├── QueueFull                too many waiting: 429, try again
├── ShuttingDown                 the server is shutting down: 503
├── NonFiniteLogits                a model's numbers overflowed: 500, and which dtype holds them
├── StepFailed               an exception in a turn: 500, with an id that the log has too
├── ModelError               the checkpoint cannot be used
│   ├── ModelNotFound             no such model, and how to get it
│   ├── CorruptFile              names file and tensor
│   └── UnsupportedModel     names the architecture or config key, lists what is supported
├── OutOfMemory                   memory for not even one sequence, or a full disk: says how much is needed
└── BadSetting               a flag or environment variable is wrong
"""

from __future__ import annotations

from collections.abc import Mapping


class OnedrawError(Exception):
    """`code` is for programs, the message for people. `status` is the HTTP status it becomes."""

    code: str = "error"
    status: int = 500
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code


class BadRequest(OnedrawError):
    code, status = "invalid_request", 400


class BadParameter(BadRequest):
    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)
        self._message = message

    def renamed(self, names: Mapping[str, str]) -> BadParameter:
        """The same about a parameter that the caller knows by another name, which may be the beginning of a path."""
        param = self.param or ""
        head = next((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), None)
        return self if head is None else BadParameter(names[head] + param[len(head) :], self._message)


class ContextOverflow(BadRequest):
    """`prompt`: tokens that the prompt has."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str, prompt: int) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt


class Unsupported(BadRequest):
    code = "unsupported"


class NoTokenLeft(BadRequest):
    code = "no_token_left"


class QueueFull(OnedrawError):
    code, status = "queue_full", 429


class ShuttingDown(OnedrawError):
    code, status = "shutting_down", 503


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


class BadSetting(OnedrawError):
    code = "bad_setting"
