"""Who may do what: two keys from the environment, compared in constant time.

    IDML_API_KEY     everything
    IDML_READ_KEY    reading and searching

With neither the service is open, and listens on the loopback interface only. With the read key alone nobody can write.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from enum import IntEnum

_PUBLIC = ("/", "/api/health", "/openapi.json")
SAFE = ("GET", "HEAD")


class Role(IntEnum):
    """What a request may do, or needs; each holds the ones before it."""

    NOBODY = 0
    READER = 1
    WRITER = 2


class Keys:
    """The keys of a service; only their hashes are kept.

    >>> keys = Keys("full-key", "read-key")
    >>> keys.role({"x-api-key": "full-key"}).name, keys.role({"authorization": "Bearer read-key"}).name
    ('WRITER', 'READER')
    >>> keys.role({"x-api-key": "a guess"}).name, Keys().role({}).name
    ('NOBODY', 'WRITER')
    """

    def __init__(self, api: str | None = None, read: str | None = None) -> None:
        for name, key in (("IDML_API_KEY", api), ("IDML_READ_KEY", read)):
            if key is not None and not re.fullmatch("[!-~]+", key):
                raise ValueError(f"{name} must be ASCII letters, digits and signs without spaces, or unset")
        if api is not None and api == read:
            raise ValueError("IDML_API_KEY and IDML_READ_KEY are the same: the read key could write; choose another")
        self._api, self._read = (None if key is None else _hash(key) for key in (api, read))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Keys":
        """The keys that the environment sets."""
        return cls(environment.get("IDML_API_KEY"), environment.get("IDML_READ_KEY"))

    @property
    def open(self) -> bool:
        """No key is set: everybody who reaches the service may do everything."""
        return self._api is None and self._read is None

    @property
    def can_write(self) -> bool:
        """There is a key that may write."""
        return self._api is not None

    def role(self, headers: Mapping[str, str]) -> Role:
        """What the sender of these headers may do."""
        if self.open:
            return Role.WRITER
        given = _hash(presented(headers) or "")
        # Both are compared, whatever the first says: the time must tell nothing.
        api, read = (known is not None and hmac.compare_digest(given, known) for known in (self._api, self._read))
        return Role.WRITER if api else Role.READER if read else Role.NOBODY


def presented(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries, if it carries one."""
    if key := headers.get("x-api-key"):
        return key
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def needed(method: str, path: str) -> Role:
    """What a request has to be allowed: the page and its health are for everybody, searching only reads.

    >>> needed("GET", "/static/app.js").name, needed("POST", "/api/search").name, needed("POST", "/api/items").name
    ('NOBODY', 'READER', 'WRITER')
    """
    if method in SAFE:
        return Role.NOBODY if path in _PUBLIC or path.startswith("/static/") else Role.READER
    return Role.READER if path == "/api/search" else Role.WRITER


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there; a name other than localhost counts as not.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "example.org")]
    [True, True, True, False, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
