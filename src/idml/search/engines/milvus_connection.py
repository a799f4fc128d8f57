"""Where a gallery in Milvus is, and the connection to its server.

    milvus://host:port/collection     a collection of a server or cluster (port 19530 if none is given)
    milvuss://host:port/collection    the same over TLS

Who asks is said by $IDML_MILVUS_TOKEN alone: ``user:password``, or an API key.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TOKEN = "IDML_MILVUS_TOKEN"
_SECURE = {"milvus": False, "milvuss": True}
_PORT = 19530
_COLLECTION = re.compile("[A-Za-z_][A-Za-z0-9_]{0,254}")
_CONNECT, _ANSWER = 10.0, 30.0  # seconds to wait for a connection, and for an answer
WRITING = 300.0  # for an answer while writing: a server that builds an index of a million rows lets a writer wait
LONG = 3600.0  # for loading and compacting a large gallery


@dataclass(frozen=True)
class Place:
    """The address of a gallery.

    >>> Place.parse("milvus://db.example.org/birds")
    Place(host='db.example.org', port=19530, collection='birds', secure=False)
    """

    host: str
    port: int
    collection: str
    secure: bool = False

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read an address; what is none is refused."""
        form = f"a gallery in Milvus is milvus://host:port/collection (milvuss:// for TLS), got {_shown(text)!r}"
        try:
            parts = urlsplit(str(text))
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ValueError(form) from None
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"no password belongs into the address of a gallery: put it into ${TOKEN}")
        collection = parts.path.removeprefix("/")
        if parts.scheme not in _SECURE or not host or parts.query or parts.fragment or port == 0:
            raise ValueError(form)
        if not _COLLECTION.fullmatch(collection):
            raise ValueError(f"{form}; a collection's name has letters, digits and _, and begins with no digit")
        return cls(host, port or _PORT, collection, _SECURE[parts.scheme])

    @property
    def server(self) -> str:
        """The server's address."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __str__(self) -> str:
        return f"milvus{'s' if self.secure else ''}://{self.server}/{self.collection}"


def _shown(text: object) -> object:
    """An address without the password that somebody wrote into it."""
    return re.sub("//[^/]*@", "//…@", text) if isinstance(text, str) else text


class Connection:
    """A connection to the server of a gallery. What goes wrong is an OSError of one line.

    Milvus answers from a state that may lie a moment back, unless it is told which one is needed at least: ``needed``,
    which `look` moves on to everything that any client was told is written. ``patience``: seconds until a server
    that does not answer counts as failed.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.needed, self.looks = place, 0, 0
        self.patience = _ANSWER
        self._mutex = threading.Lock()
        try:
            from pymilvus import MilvusClient  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ValueError("galleries in Milvus need pymilvus: pip install 'idml[milvus]'") from None
        for name in ("pymilvus", "pymilvus.milvus_client"):  # it prints a traceback of everything that it raises
            logging.getLogger(name).setLevel(logging.CRITICAL)
        uri, token = f"{'https' if place.secure else 'http'}://{place.server}", os.environ.get(TOKEN, "")
        with self._explained(f"cannot open Milvus at {place.server} (is it there, and is ${TOKEN} right?)"):
            # dedicated: it would share a connection without TLS with one that asks for it
            self._client = MilvusClient(uri=uri, token=token, timeout=_CONNECT, dedicated=True)

    def close(self) -> None:
        """Let go of it."""
        self._client.close()

    def look(self) -> None:
        """From now on, see everything that was written until now."""
        with self._explained():
            # the one method we need that MilvusClient does not offer itself; 0, where a service does not know it,
            # means the newest state
            now = self._client._get_connection().alloc_timestamp(timeout=self.patience)
        with self._mutex:
            self.needed = max(self.needed, now)
            self.looks += 1

    def do(self, method: str, *, seconds: float | None = None, **arguments: Any) -> Any:
        """Call a method of MilvusClient with the collection and a time limit."""
        with self._explained():
            return getattr(self._client, method)(self.place.collection, timeout=seconds or self.patience, **arguments)

    def read(self, method: str, **arguments: Any) -> Any:
        """The same for reading: what is needed is seen."""
        return self.do(method, consistency_level="Customized", guarantee_timestamp=self.needed, **arguments)

    def compaction(self, job: int) -> str:
        """How far a compaction is."""
        with self._explained():
            return str(self._client.get_compaction_state(job, timeout=self.patience))

    def count(self, condition: str = "") -> int:
        """How many rows there are, of those that fulfil a condition."""
        return int(self.read("query", filter=condition, output_fields=["count(*)"])[0]["count(*)"])

    @contextmanager
    def _explained(self, trouble: str = "") -> Iterator[None]:
        from grpc import RpcError  # type: ignore[import-untyped,unused-ignore]
        from pymilvus.exceptions import MilvusException  # type: ignore[import-untyped,unused-ignore]

        try:
            yield
        except (MilvusException, RpcError) as error:
            words = " ".join(str(getattr(error, "message", error)).split())[:300]
            raise OSError(f"{trouble or f'Milvus at {self.place.server} failed'}: {words}") from error
