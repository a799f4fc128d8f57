"""Which of our files run: a tracer of the package's functions."""

import inspect
import sys
import threading
from pathlib import Path

import idml

SOURCE = Path(idml.__file__).parent
MOST_FOR_A_SEARCH = 20


class Tracer:
    """Collects the files of the package of which a function body runs; what runs during an import does not count."""

    def __init__(self):
        self.files = set()

    def _call(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED or not code.co_filename.startswith(str(SOURCE)):
            return
        file = str(Path(code.co_filename).relative_to(SOURCE))
        if file in self.files:
            return
        while frame := frame.f_back:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(SOURCE)):
                return
        self.files.add(file)

    def start(self):
        threading.setprofile(self._call)
        sys.setprofile(self._call)

    def stop(self):
        sys.setprofile(None)
        threading.setprofile(None)
