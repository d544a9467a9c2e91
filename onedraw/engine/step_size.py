"""How large a step may be: the most rows and tokens, and the most tokens of prompts while replies are generated.

A large step computes prompts with the least overhead, but every running reply waits for its end. While replies are generated,
prompts therefore get only as many tokens of a step as the device computes in the given time, by the measured speed of the steps
so far. After the device had no memory for a step, all steps are at most half as large for a while.

Sizes decide when a token is computed, never which token it is.
"""

from __future__ import annotations

LEAST_TOKENS = 16  # After the device ran out of memory, the token budget of a step is halved, but not below this.
GROW_STEPS = 64  # After this many computed steps, a budget that was halved is doubled again.
LEAST_PROMPT_TOKENS = 64  # A step computes this many tokens of prompts however long they take: fewer would take almost as long.
DECAY = 0.7  # In the measured speed, each step with a prompt weights the steps before it down by this factor.


class StepSize:
    """The limits on the next step. The scheduler owns it. `seconds` is how long the prompts of a step may take while replies are
    generated; None: prompts may use all tokens of a step."""

    def __init__(self, *, rows: int, tokens: int, chunk: int, seconds: float | None = None) -> None:
        self.rows, self.tokens = rows, tokens  # the present limits
        self._all_rows, self._all_tokens = rows, tokens  # the limits unless memory ran out
        self._least = max(chunk, LEAST_TOKENS)
        self._least_prompt = max(chunk, LEAST_PROMPT_TOKENS)
        self._steps_since_shrunk = 0
        self._seconds = seconds
        self._prompt_tokens, self._prompt_seconds = 0.0, 0.0  # weighted sums over the steps with a prompt

    def prompt_tokens(self, *, generating: bool) -> int:
        """Return the most tokens of prompts in the next step, given whether replies are generated now."""
        if not generating or self._seconds is None or self._prompt_seconds <= 0.0:
            return self.tokens
        affordable = self._seconds * self._prompt_tokens / self._prompt_seconds
        return int(min(max(affordable, self._least_prompt), self.tokens))

    def record(self, *, prompt_tokens: int, seconds: float) -> bool:
        """Record a computed step. Return whether steps may have more rows from now on."""
        if prompt_tokens and 0.0 < seconds < float("inf"):
            self._prompt_tokens = DECAY * self._prompt_tokens + prompt_tokens
            self._prompt_seconds = DECAY * self._prompt_seconds + seconds
        if self.rows == self._all_rows and self.tokens == self._all_tokens:
            return False
        self._steps_since_shrunk += 1
        if self._steps_since_shrunk % GROW_STEPS:
            return False
        self.rows = min(2 * self.rows, self._all_rows)
        self.tokens = min(2 * self.tokens, self._all_tokens)
        return True

    def shrink(self, *, rows: int, tokens: int) -> bool:
        """Allow at most half of this size from now on, because the device had no memory for a step of this size. Return whether
        that is possible."""
        self.rows = max(min(rows, self.rows) // 2, 1)
        self.tokens = max(min(tokens, self.tokens) // 2, self._least)
        self._steps_since_shrunk = 0
        return rows > 1 or tokens > self._least
