"""Who may ask: keys with names. The names go into logs, the keys nowhere.

In: a file of lines `NAME KEY`, or a key from a flag. Out: Keyring, which knows whose key a request brought.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from onedraw.errors import BadSetting

log = logging.getLogger("onedraw.server")

NAME = re.compile(r"[\w.@-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    key: str = field(repr=False)  # a secret: never shown, never logged

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise BadSetting(f"a key's name must be letters, digits and _ . @ - (64 at most), not {self.name!r}")
        if not self.key.strip() or self.key != self.key.strip():
            raise BadSetting(f"the key of {self.name} must not be empty, nor begin or end with a space")


class ApiKeys:
    """Finds whose key it is. Every key is compared, as a digest, in constant time: how long it takes tells nothing."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple((key.name, _digest(key.key.encode())) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def owner(self, given: bytes) -> str | None:
        digest, found = _digest(given), None
        for name, known in self._keys:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Empty lines and lines that begin with # are left out. No error ever shows a key."""
    try:
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("%s can be read by others than its owner; chmod 600 it", path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadSetting(f"--api-key-file: cannot read {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadSetting(f"--api-key-file: {path} is not UTF-8 text") from None
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = line.strip().partition(" ")
        try:
            keys.append(ApiKey(name, key.strip()))
        except BadSetting:
            raise BadSetting(f"--api-key-file: {path}:{number} is not NAME KEY, a name and a key with a space between") from None
    for what, values in (("name", [key.name for key in keys]), ("key", [key.key for key in keys])):
        if len(set(values)) < len(values):
            raise BadSetting(f"--api-key-file: {path} has the same {what} twice")
    if not keys:
        raise BadSetting(f"--api-key-file: {path} holds no key; write lines NAME KEY")
    return tuple(keys)
