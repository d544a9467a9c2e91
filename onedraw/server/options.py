"""How to serve: everything about the wire, nothing about the model.

In: serving flags (`max_body` is `--max-body`). Out: ServerOptions, complete and checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onedraw.errors import BadSetting

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = field(default=None, repr=False)  # a secret: never shown, never logged
    cors_origins: tuple[str, ...] = ()
    max_body: int = 32 * 2**20  # bytes
    lenient: bool = False  # ignore unknown fields, and say so in a header
    drain_seconds: float = 30.0  # how long running requests may go on after SIGTERM
    aliases: tuple[str, ...] = ()  # other names the served model answers to
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadSetting(f"--port: must be in [0, 65535], not {self.port}")
        if self.max_body < 1:
            raise BadSetting(f"--max-body: must be at least 1 byte, not {self.max_body}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise BadSetting(f"--drain-seconds: must be 0 or more, not {self.drain_seconds}")
        if self.api_key is not None and (not self.api_key.strip() or self.api_key != self.api_key.strip()):
            raise BadSetting("--api-key: must not be empty, nor begin or end with a space")
        if self.log_level not in LOG_LEVELS:
            raise BadSetting(f"--log-level: {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
