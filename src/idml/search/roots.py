"""Where the image files of a gallery in a folder are.

    GALLERY/uploads/      images that were sent, under their ids
    GALLERY/roots.json    {name: folder}, the folders that were indexed and stay where they are

An item's path is the name of its root, and the path below that.
"""

import json
import os
import re
from pathlib import Path

from idml.files import write_whole
from idml.search.engines.store import sync_folder
from idml.search.thumbnails import EXTENSIONS

UPLOADS, ROOTS = "uploads", "roots.json"
_UPLOADED = re.compile("[0-9a-f]{32}")


class Roots:
    """The roots of the gallery in ``folder``. What another process adds is seen at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> dict[str, str]:
        """The indexed folders by name."""
        path = self.folder / ROOTS
        try:
            roots = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is damaged: it is not JSON") from None
        if not isinstance(roots, dict) or not all(isinstance(root, str) for root in roots.values()):
            raise ValueError(f"{path} is damaged: it should name folders")
        return roots

    def name(self, folder: str) -> str:
        """The name of a folder (absolute, links resolved), which becomes a root if it is none yet."""
        roots = self.read()
        for name, root in roots.items():
            if root == folder:
                return name
        own = os.path.basename(folder) or "root"
        taken = {UPLOADS, *roots}
        name = next(x for n in range(1, len(taken) + 2) if (x := own if n == 1 else f"{own}-{n}") not in taken)
        write_whole(self.folder / ROOTS, (json.dumps({**roots, name: folder}, indent=1) + "\n").encode())
        sync_folder(self.folder)
        return name

    def find(self, path: str) -> Path | None:
        """The file of an item's path, links resolved; None if there is none, or it lies outside its root."""
        name, _, rest = path.partition("/")
        root = str(self.folder / UPLOADS) if name == UPLOADS else self.read().get(name)
        if not rest or root is None:
            return None
        base = os.path.realpath(root)
        file = os.path.realpath(os.path.join(base, rest))
        inside = file.startswith(base.rstrip("/") + "/")
        return Path(file) if inside and os.path.isfile(file) else None

    def keep(self, path: str, data: bytes) -> None:
        """Write the bytes of an uploaded image to its path; on return they are on the disk."""
        file = self.folder / path
        if not file.parent.is_dir():
            file.parent.mkdir()
            sync_folder(self.folder)
        write_whole(file, data)
        sync_folder(file.parent)

    def forget(self, id: str) -> None:
        """Delete the bytes of an uploaded image, if there are any."""
        if _UPLOADED.fullmatch(id):
            for extension in EXTENSIONS.values():
                (self.folder / UPLOADS / f"{id}.{extension}").unlink(missing_ok=True)
