"""Options of the HTTP server, with their checks. A field has the name of its flag: `max_body` is set by `--max-body`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from onedraw.errors import BadSetting
from onedraw.server.auth import ApiKey
from onedraw.server.limits import CallerLimits
from onedraw.server.logs import FORMATS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0 lets the operating system choose a free port.
    api_key: str | None = field(default=None, repr=False)  # A secret: it is left out of repr() and of the log.
    api_keys: tuple[ApiKey, ...] = ()  # The keys of --api-key-file, each with a name for the log.
    cors_origins: tuple[str, ...] = ()  # Web pages of these origins may call the API; `*` stands for any.
    allow_hosts: tuple[str, ...] = ()  # Values of the Host header that are accepted on a server without an API key.
    max_body: int = 32 * 2**20  # The largest request body, in bytes.
    lenient: bool = False  # Ignore unknown request fields and list them in the header x-onedraw-ignored.
    drain_seconds: float = 30.0  # Running requests may take this long to finish after SIGTERM.
    aliases: tuple[str, ...] = ()  # Further names under which requests may ask for the served model.
    root_path: str = ""  # A prefix below which a proxy serves this server, such as /llm.
    strict_model_names: bool = False  # Refuse requests that name another model.
    request_seconds: float | None = None  # The longest time from a request's arrival to its last token; None means no limit.
    # Limits for each API key, or for each client address on a server without keys. None means no limit.
    key_requests: int | None = None
    key_tokens: int | None = None
    key_requests_per_minute: int | None = None
    key_tokens_per_minute: int | None = None
    update_token: str | None = field(default=None, repr=False)  # A secret, which allows to pause and to update the weights.
    weight_dir: Path | None = None  # The folder below which the weights of updates are read.
    metrics_prefix: str = ""  # A prefix of the names in /metrics, such as vllm: for dashboards made for vLLM.
    otlp_traces_endpoint: str | None = None  # The URL to which OpenTelemetry spans are sent; None means no traces.
    batch_dir: Path | None = None  # The folder of uploaded files and batches; None means that there are none.
    batch_disk: int = 8 * 2**30  # The most bytes that all uploaded files and batches may have together.
    log_level: str = "info"
    log_format: str = "text"
    log_prompts: bool = False  # Write the text of every prompt into the log.

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadSetting(f"--port: must be in [0, 65535], not {self.port}")
        if self.max_body < 1:
            raise BadSetting(f"--max-body: must be at least 1 byte, not {self.max_body}")
        if self.batch_disk < 1:
            raise BadSetting(f"--batch-disk: must be at least 1 byte, not {self.batch_disk}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise BadSetting(f"--drain-seconds: must be 0 or more, not {self.drain_seconds}")
        if self.api_key is not None and (not self.api_key.strip() or self.api_key != self.api_key.strip()):
            raise BadSetting("--api-key: must not be empty, nor begin or end with a space")
        if self.update_token is not None and (not self.update_token.strip() or self.update_token != self.update_token.strip()):
            raise BadSetting("--update-token: must not be empty, nor begin or end with a space")
        if self.weight_dir is not None and not self.weight_dir.is_dir():
            raise BadSetting(f"--weight-dir: {self.weight_dir} is not a folder; create it first")
        if self.weight_dir is not None and self.update_token is None:
            raise BadSetting("--weight-dir: needs --update-token, which updates of the weights must send")
        if self.request_seconds is not None and not 0 < self.request_seconds < float("inf"):
            raise BadSetting(f"--request-seconds: must be over 0, not {self.request_seconds}")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise BadSetting(f"--root-path: {self.root_path!r} must begin with / and not end with it, like /llm")
        if not re.fullmatch(r"([a-zA-Z_:][\w:]*)?", self.metrics_prefix, re.ASCII):
            raise BadSetting(f"--metrics-prefix: {self.metrics_prefix!r} must be letters, digits, _ and :, like vllm:")
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://.", self.otlp_traces_endpoint):
            raise BadSetting(
                f"--otlp-traces-endpoint: {self.otlp_traces_endpoint!r} is not a URL, like http://127.0.0.1:4318/v1/traces"
            )
        for name in ("key_requests", "key_tokens", "key_requests_per_minute", "key_tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSetting(f"--{name.replace('_', '-')}: must be at least 1, not {value}; omit it for no limit")
        for host in self.allow_hosts:
            if not host.strip() or "/" in host:
                raise BadSetting(f"--allow-host: {host!r} is not a host name, like chat.example")
        if self.log_format not in FORMATS:
            raise BadSetting(f"--log-format: {self.log_format!r} is not one of {', '.join(FORMATS)}")
        if self.log_level not in LOG_LEVELS:
            raise BadSetting(f"--log-level: {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")

    @property
    def batch_share(self) -> int:
        """The most bytes of `batch_disk` that one key may use, so that it cannot use up what all others need."""
        return self.batch_disk if len(self.keys) < 2 else self.batch_disk // 2

    @property
    def limits(self) -> CallerLimits:
        return CallerLimits(
            requests=self.key_requests,
            tokens=self.key_tokens,
            requests_per_minute=self.key_requests_per_minute,
            tokens_per_minute=self.key_tokens_per_minute,
        )

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All API keys. With none, the server accepts requests without a key."""
        return self.api_keys if self.api_key is None else (ApiKey("api-key", self.api_key), *self.api_keys)
