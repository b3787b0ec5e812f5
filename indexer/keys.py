"""Keys of the API: who may ask for what, as an operator writes it down.

A token is 256 random bits, shown once; what is configured is its SHA-256. A slow hash would gain nothing: it makes
words dear that can be guessed, and of these tokens nobody can try a noticeable part, however cheap one try is.

A key is one word, `NAME:SHA256:ROLE`, or `NAME:SHA256:ROLE:TENANT,TENANT` for a key that is bound to some tenants.
Words are separated by white space; from one that begins with `#` on, the rest of a line is passed over. Tenants are
percent-encoded where they hold white space, `,` or `%`. What is wrong with a text is told without repeating any of it:
somebody may have put the token there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote, unquote

from pydantic import SecretStr

from indexer.errors import SettingsError
from indexer.settings import Settings

TOKEN_BEGINNING = "kvi_"  # so that those who search for leaked secrets know one
TOKEN_BYTES = 32
KEYS_MAX = 1_000
"""Every one is compared with for every new connection: 0.2 us each."""
TENANTS_MAX = 1_000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FORM = "NAME:SHA256:ROLE or NAME:SHA256:ROLE:TENANT,TENANT"


class Role(IntEnum):
    """Each may do what those before it may."""

    QUERY = 1
    OPERATE = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Key:
    """`digest`: SHA-256 of the token. `tenants`: all that it is for; None = every tenant."""

    name: str
    digest: bytes = field(repr=False)
    role: Role
    tenants: frozenset[str] | None = None

    def __str__(self) -> str:
        """The word that configures it."""
        word = f"{self.name}:{self.digest.hex()}:{self.role}"
        if self.tenants is None:
            return word
        return f"{word}:{','.join(quote(tenant, safe=':/@+=') for tenant in sorted(self.tenants))}"


def new_key(name: str, role: str, tenants: Sequence[str] | None = None) -> tuple[str, Key]:
    """A new token and its key. Raises SettingsError."""
    token = TOKEN_BEGINNING + secrets.token_urlsafe(TOKEN_BYTES)
    try:
        if not _NAME.fullmatch(name):
            raise ValueError("the name must be 1 to 64 letters, digits, dots, dashes or underscores")
        bound_to = None if tenants is None else _tenants(tenants)
        return token, Key(name, digest_of(token.encode()), _role(role), bound_to)
    except ValueError as error:
        raise SettingsError("key", f"bad key: {error}") from None


def digest_of(token: bytes) -> bytes:
    return sha256(token).digest()


def configured_keys(settings: Settings) -> list[Key] | None:
    """Those of the setting and those of the file; None = keys are not configured at all. Raises SettingsError."""
    if settings.api_keys is None and settings.api_keys_file is None:
        return None
    keys = []
    if settings.api_keys is not None:
        keys += _parse("api_keys", "api_keys", settings.api_keys.get_secret_value())
    if settings.api_keys_file is not None:
        keys += _parse("api_keys_file", str(settings.api_keys_file), _read(settings.api_keys_file))
    if len(keys) > KEYS_MAX:
        raise SettingsError("api_keys", f"{len(keys)} keys are configured; at most {KEYS_MAX} are taken")
    names: set[str] = set()
    for key in keys:
        if key.name in names:
            raise SettingsError("api_keys", f"there are two keys with the name {key.name!r}")
        names.add(key.name)
    if not keys:
        raise SettingsError("api_keys", "keys are configured, but there is none: nobody could ask anything")
    return keys


def with_fleet_key(settings: Settings) -> tuple[Settings, str | None]:
    """With one key more, for the simulated fleet, and its token; None where none is needed."""
    if not settings.simulate or (settings.api_keys is None and settings.api_keys_file is None):
        return settings, None
    token, key = new_key("simulated-fleet", str(Role.OPERATE), ["default"])
    others = "" if settings.api_keys is None else settings.api_keys.get_secret_value()
    return settings.model_copy(update={"api_keys": SecretStr(f"{others}\n{key}")}), token


def parse_keys(text: str) -> list[Key]:
    """Raises ValueError."""
    words = [word for line in text.splitlines() for word in takewhile(lambda w: w[0] != "#", line.split())]
    keys = []
    for place, word in enumerate(words, 1):
        try:
            keys.append(_parse_key(word))
        except ValueError as error:
            raise ValueError(f"key {place}: {error}") from None
    return keys


def _parse(setting: str, origin: str, text: str) -> list[Key]:
    try:
        return parse_keys(text)
    except ValueError as error:
        raise SettingsError(setting, f"bad keys in {origin}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError("api_keys_file", f"the file of keys {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError("api_keys_file", f"the file of keys {path} is no text") from None


def _parse_key(word: str) -> Key:
    name, digest, role, *tenants = word.split(":", 3) if word.count(":") >= 2 else ("", "", "")
    if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"must look like {_FORM}, as `kv-indexer key new` prints it")
    bound_to = _tenants([unquote(tenant) for tenant in tenants[0].split(",")]) if tenants else None
    return Key(name, bytes.fromhex(digest), _role(role), bound_to)


def _role(text: str) -> Role:
    for role in Role:
        if str(role) == text:
            return role
    raise ValueError("the role must be query, operate or admin")


def _tenants(tenants: Sequence[str]) -> frozenset[str]:
    if not tenants or not all(tenants) or len(tenants) > TENANTS_MAX:
        raise ValueError(f"tenants must be 1 to {TENANTS_MAX} names; a key for all of them has no such part at all")
    return frozenset(tenants)
