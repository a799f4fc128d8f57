"""How a file is written, and where files go that can be made again."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it: a kill at any moment leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where caches go: $IDML_CACHE, else idml in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("IDML_CACHE"):
        return Path(own)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "idml"
    try:
        return Path.home() / ".cache" / "idml"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "idml"
