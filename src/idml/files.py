"""How a file is written."""

import os
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
