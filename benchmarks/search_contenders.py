"""Who keeps and searches vectors in `search.py`, and the made vectors. Libraries are imported where they are used."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

K = 10
QUERIES = 256
DURABLE = 64  # vectors that a gallery acknowledges together
BLOCK = 1 << 14  # vectors made or read at a time
Figures = dict[str, float]
Rows = NDArray[np.float32]
Numbers = NDArray[np.int64]


class Size(NamedTuple):
    """How many vectors, dimensions and classes; how many are added at a time; the index in Milvus."""

    rows: int
    dims: int
    classes: int
    batch: int
    milvus: Literal["HNSW", "IVF_FLAT"]

    @property
    def lists(self) -> int:
        """Of faiss's IVF: as many as our Milvus engine asks for, but each with 40 vectors or more."""
        return min(1024, self.rows // 40)


SIZES = {
    "60k": Size(60_502, 512, 11_316, 1_024, "HNSW"),
    "1m": Size(1_000_000, 512, 100_000, 1000, "IVF_FLAT"),
    "small": Size(3_000, 64, 200, 64, "HNSW"),
}


def make(folder: Path, size: Size) -> None:
    """Write unit vectors in overlapping classes, queries of the same classes, and the nearest rows of every query."""
    g = torch.Generator().manual_seed(0)
    centres, plane = torch.randn(size.classes, 24, generator=g), torch.randn(24, size.dims, generator=g)

    def some(count: int) -> torch.Tensor:
        labels = torch.randint(size.classes, (count,), generator=g)
        latent = centres[labels] + 0.6 * torch.randn(count, 24, generator=g)
        return torch.nn.functional.normalize(latent @ plane + 0.5 * torch.randn(count, size.dims, generator=g))

    queries = some(QUERIES)
    near, rows = torch.empty(QUERIES, 0), torch.empty(QUERIES, 0, dtype=torch.long)
    with (folder / "vectors.f32").open("wb") as file:
        for first in range(0, size.rows, BLOCK):
            x = some(min(BLOCK, size.rows - first))
            x.numpy().tofile(file)
            found = (queries @ x.T).topk(min(4 * K, len(x)), dim=1)
            near, order = torch.cat([near, found.values], dim=1).topk(min(4 * K, first + len(x)), dim=1)
            rows = torch.cat([rows, found.indices + first], dim=1).gather(1, order)
    np.save(folder / "queries.npy", queries.numpy())
    stored = np.memmap(folder / "vectors.f32", np.float32, "r", shape=(size.rows, size.dims))
    gaps = (torch.from_numpy(stored[rows.numpy()]).double() - queries.double().unsqueeze(1)).square().sum(2)
    np.save(folder / "nearest.npy", rows.gather(1, gaps.topk(K, largest=False).indices).numpy())


class Contender:
    """Someone who keeps vectors at a place and searches them; `fill` and `open` happen in processes of their own."""

    needs: tuple[str, ...]  # modules that are imported before anything is measured

    def __init__(self, folder: Path, size: Size, place: str) -> None:
        self.folder, self.size, self.place = folder, size, place

    def fill(self) -> Iterator[Figures]:
        """Add all vectors; figures as they come."""
        raise NotImplementedError

    def open(self) -> None:
        """Open what was filled."""
        raise NotImplementedError

    def search(self, queries: Rows) -> Numbers:
        """The numbers of the nearest vectors [n, 10]."""
        raise NotImplementedError

    def read(self, first: int, count: int) -> Rows:
        """Vectors; read, not mapped, so that they do not count as memory of whoever keeps them."""
        skip, dims = first * self.size.dims * 4, self.size.dims
        return np.fromfile(self.folder / "vectors.f32", np.float32, count * dims, offset=skip).reshape(-1, dims)


class Ours(Contender):
    """A gallery, added to as users do: a batch is acknowledged before the next one comes."""

    engine: Any

    def _filled(self, engine: Any, batch: int) -> Iterator[Figures]:
        from idml.embeddings import Embeddings
        from idml.search.engines import Item

        taken, size, told = 0.0, self.size, 0
        for first in range(0, size.rows, batch):
            vectors = self.read(first, batch)
            items = [
                Item(
                    id=f"{n:032x}",
                    path=f"{n % size.classes}/{n}.jpg",
                    checksum=hashlib.sha256(b"%d" % n).hexdigest(),
                    label=f"class {n % size.classes}",
                )
                for n in range(first, first + len(vectors))
            ]
            embeddings = Embeddings.certain(torch.from_numpy(vectors))
            started = time.perf_counter()
            engine.add(items, embeddings)
            taken += time.perf_counter() - started
            added = first + len(vectors)
            if added - told >= size.rows // 10 or added == size.rows:
                told = added
                yield {"added": added, "added/s": added / taken}

    def search(self, queries: Rows) -> Numbers:
        """By the distance of unit vectors, as a gallery without the introspective metric."""
        from idml.embeddings import Embeddings

        found = self.engine.search(Embeddings.certain(torch.from_numpy(queries)), K)
        return np.array([[int(id, 16) for id in ids] for ids in found.ids])


class Embedded(Ours):
    """The SQLite engine of galleries in a folder; exact."""

    needs: tuple[str, ...] = ("idml.search.engines.sqlite",)

    def _engine(self) -> Any:
        from idml.search.engines.sqlite import SqliteEngine

        return SqliteEngine

    def fill(self) -> Iterator[Figures]:
        """As `idml index` does: every 64 vectors are on the disk before the next ones come."""
        from idml.search.engines import Properties

        with self._engine().create(self.place, Properties("benchmark", self.size.dims)) as engine:
            yield from self._filled(engine, DURABLE)

    def open(self) -> None:
        """As a reader."""
        self.engine = self._engine().open(self.place)

    def add_more(self) -> None:
        """Add 64 vectors that are near no query, as another process does."""
        from idml.embeddings import Embeddings
        from idml.search.engines import Item

        items = [Item(path="", checksum=hashlib.sha256(b"more %d" % n).hexdigest()) for n in range(DURABLE)]
        opposite = -torch.from_numpy(np.load(self.folder / "queries.npy")).mean(0, keepdim=True)
        with self._engine().open(self.place, write=True) as engine:
            engine.add(items, Embeddings.certain(opposite + 0.01 * torch.randn(DURABLE, self.size.dims)))


class Old(Embedded):
    """The engine of galleries in a folder before SQLite, from the source tree that --old names; exact."""

    needs = ("idml.search.engines.embedded",)

    def _engine(self) -> Any:
        from idml.search.engines.embedded import EmbeddedEngine  # type: ignore[import-not-found]

        return EmbeddedEngine


class Milvus(Ours):
    """The engine of galleries in Milvus, with an approximate index."""

    needs = ("idml.search.engines.milvus", "pymilvus")

    def fill(self) -> Iterator[Figures]:
        """Wait for the index too, and let the server forget what it holds in memory."""
        from idml.search.engines import Properties
        from idml.search.engines.milvus import MilvusEngine
        from idml.search.engines.milvus_connection import LONG

        properties = Properties("benchmark", self.size.dims)
        with MilvusEngine.create(self.place, properties, index=self.size.milvus) as engine:
            yield from self._filled(engine, self.size.batch)
            started, connection, quiet = time.perf_counter(), engine._opened(), 0
            connection.do("flush", seconds=LONG)
            while quiet < 5:  # it may go on merging what is indexed, and index it anew
                time.sleep(1)
                state = connection.do("describe_index", index_name="semantic")
                quiet = quiet + 1 if state["indexed_rows"] >= self.size.rows else 0
            yield {"ready s": time.perf_counter() - started - quiet}
            connection.do("release_collection", seconds=LONG)

    def open(self) -> None:
        """The server loads vectors and index again."""
        from idml.search.engines.milvus import MilvusEngine

        self.engine = MilvusEngine.open(self.place)


class Faiss(Contender):
    """A bare index in memory."""

    needs = ("faiss",)
    index: Any

    def _empty(self) -> Any:
        raise NotImplementedError

    def filled(self) -> Any:
        """An index with all vectors."""
        index = self._empty()
        for first in range(0, self.size.rows, BLOCK):
            index.add(self.read(first, BLOCK))
        return index

    def fill(self) -> Iterator[Figures]:
        """In memory; the file comes after the clock has stopped."""
        import faiss

        started = time.perf_counter()
        index = self.filled()
        yield {"added": index.ntotal, "added/s": index.ntotal / (time.perf_counter() - started)}
        faiss.write_index(index, self.place)

    def open(self) -> None:
        """Read the file."""
        import faiss

        self.index = faiss.read_index(self.place)

    def search(self, queries: Rows) -> Numbers:
        """What the index finds."""
        found: Numbers = self.index.search(queries, K)[1]
        return found


class FlatL2(Faiss):
    """IndexFlatL2: exact, by the distance."""

    def _empty(self) -> Any:
        import faiss

        return faiss.IndexFlatL2(self.size.dims)


class FlatIP(Faiss):
    """IndexFlatIP: exact for unit vectors, by the product."""

    def _empty(self) -> Any:
        import faiss

        return faiss.IndexFlatIP(self.size.dims)


class IVF(Faiss):
    """IndexIVFFlat, of whose lists a sixteenth is searched."""

    def _empty(self) -> Any:
        import faiss

        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(self.size.dims), self.size.dims, self.size.lists)
        index.train(self.read(0, 256 * self.size.lists))
        index.nprobe = max(1, self.size.lists // 16)
        return index


CONTENDERS: dict[str, type[Contender]] = {
    "embedded": Embedded,
    "old": Old,
    "faiss-l2": FlatL2,
    "faiss-ip": FlatIP,
    "faiss-ivf": IVF,
    "milvus": Milvus,
}
