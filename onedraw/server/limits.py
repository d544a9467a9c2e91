"""Limits for each caller: requests and tokens, in flight and per minute.

A caller is an API key, or a client address on a server without keys. What is in flight belongs to requests that have not ended
yet. Each request gets a Permit, which counts what it has in flight and is closed when it ends, or it is refused with RateLimited,
which says which limit was reached and when to try again. Everything here runs on the server's event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from onedraw.errors import BadRequest, OnedrawError

PERMIT = "onedraw.permit"  # the entry of the ASGI scope with the request's Permit
MANY_ACCOUNTS = 10_000  # From this number of accounts on, unused ones (`Account.unused`) are dropped, to bound memory.


class RateLimited(OnedrawError):
    code, status = "rate_limit_exceeded", 429

    def __init__(self, message: str, *, limit: str, seconds: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_seconds = max(math.ceil(seconds), 1)


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The limits, which are the same for every caller. None means unlimited. A field is named like its flag, without `--key-`."""

    requests: int | None = None
    tokens: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Allowance:
    """The amount that a caller may still use, as in a token bucket: it grows evenly by `limit` per minute, up to `limit`. It may
    become negative, since the tokens of a reply are counted after they were sampled; then the caller waits longer."""

    def __init__(self, limit: int, now: float) -> None:
        self._limit, self._left, self._time = limit, float(limit), now

    def left(self, now: float) -> float:
        self._left = min(self._left + max(now - self._time, 0.0) * self._limit / 60, self._limit)
        self._time = now
        return self._left

    def take(self, amount: int, now: float) -> None:
        self._left = self.left(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        return max(amount - self.left(now), 0.0) * 60 / self._limit

    def full(self, now: float) -> bool:
        return self.left(now) >= self._limit


@dataclass(slots=True)
class Account:
    """The requests and tokens that one caller has in flight, and what it may still use of its limits per minute."""

    minute_requests: Allowance | None
    minute_tokens: Allowance | None
    requests: int = 0
    tokens: int = 0

    def unused(self, now: float) -> bool:
        """Whether the account does not differ from a new one, so that it can be dropped."""
        allowances = (self.minute_requests, self.minute_tokens)
        return not self.requests and all(one is None or one.full(now) for one in allowances)


class Accounts:
    """The accounts of all callers. The app owns it."""

    def __init__(
        self,
        limits: CallerLimits,
        *,
        refused: Callable[[str, str], None] = lambda caller, limit: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._refused, self._clock = limits, refused, clock
        self._accounts: dict[str, Account] = {}
        self._drop_at = MANY_ACCOUNTS

    def __len__(self) -> int:
        return len(self._accounts)

    def in_flight(self) -> Iterator[tuple[str, int, int]]:
        """Yield every caller with the numbers of its requests and tokens in flight."""
        return ((caller, account.requests, account.tokens) for caller, account in self._accounts.items())

    def begin(self, caller: str) -> Permit:
        """Count a request as in flight and return its permit, or raise RateLimited."""
        limits, account, now = self._limits, self._account(caller), self._clock()
        if limits.requests is not None and account.requests >= limits.requests:
            self.refuse(caller, "requests", f"{account.requests} requests in flight", "wait until one has ended", 1)
        if account.minute_requests is not None and account.minute_requests.left(now) < 1:
            seconds = account.minute_requests.seconds_until(1, now)
            self.refuse(caller, "requests_per_minute", "too many requests in a minute", _later(seconds), seconds)
        if account.minute_tokens is not None and account.minute_tokens.left(now) <= 0:
            seconds = account.minute_tokens.seconds_until(1, now)
            self.refuse(caller, "tokens_per_minute", "too many tokens in a minute", _later(seconds), seconds)
        account.requests += 1
        if account.minute_requests is not None:
            account.minute_requests.take(1, now)
        return Permit(self, caller, account)

    def reserve(self, caller: str, account: Account, *, prompt: int, reply: int) -> None:
        """Count a request's tokens as in flight, and those of its prompts as used. Raise BadRequest if they exceed the limit on
        tokens in flight even alone, RateLimited if they do together with the tokens that the caller has in flight. `reply` is the
        most tokens of all replies."""
        most, tokens = self._limits.tokens, prompt + reply
        if most is not None and tokens > most:
            raise BadRequest(
                f"the prompts and max_tokens of all choices are {tokens} tokens together, and a caller may have {most} in flight "
                "(--key-tokens); send shorter prompts, or lower max_tokens or n",
                code="request_too_large",
            )
        if most is not None and account.tokens + tokens > most:
            held = f"{account.tokens} tokens in flight, and this request needs {tokens}"
            self.refuse(caller, "tokens", held, "wait until a request has ended, or lower max_tokens", 1)
        account.tokens += tokens
        self.use(account, prompt)

    def use(self, account: Account, tokens: int) -> None:
        if account.minute_tokens is not None:
            account.minute_tokens.take(tokens, self._clock())

    def refuse(self, caller: str, limit: str, what: str, advice: str, seconds: float) -> None:
        most = getattr(self._limits, limit)
        self._refused(caller, limit)
        flag = f"--key-{limit.replace('_', '-')}"
        raise RateLimited(f"{what}: the limit of this caller is {most} ({flag}); {advice}", limit=limit, seconds=seconds)

    def _account(self, caller: str) -> Account:
        found = self._accounts.get(caller)
        if found is None:
            now, limits = self._clock(), self._limits
            if len(self._accounts) >= self._drop_at:
                self._accounts = {name: account for name, account in self._accounts.items() if not account.unused(now)}
                self._drop_at = max(2 * len(self._accounts), MANY_ACCOUNTS)
            requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
            found = self._accounts[caller] = Account(
                None if requests is None else Allowance(requests, now), None if tokens is None else Allowance(tokens, now)
            )
        return found


def _later(seconds: float) -> str:
    return f"try again in {max(math.ceil(seconds), 1)} s"


@dataclass(slots=True)
class Permit:
    """The right of one request to run, with the number of tokens that it has in flight. PermitMiddleware closes it when the
    request ends."""

    accounts: Accounts
    caller: str
    account: Account
    tokens: int = 0
    closed: bool = field(default=False)

    def reserve(self, *, prompt: int, reply: int) -> None:
        self.accounts.reserve(self.caller, self.account, prompt=prompt, reply=reply)
        self.tokens += prompt + reply

    def use(self, tokens: int) -> None:
        """Count tokens that were sampled for the request as used."""
        self.accounts.use(self.account, tokens)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.account.requests -= 1
            self.account.tokens -= self.tokens


class PermitMiddleware:
    """Closes the permit of a request when its response has been sent, its client has disconnected or it has failed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            permit: Permit | None = scope.get(PERMIT)
            if permit is not None:
                permit.close()
