"""Likely mislabelled, ambiguous and duplicate images of a data set, and a page to review them.

The package can be called: ``idml.audit(run, data, out=…)`` is `idml.audit.run.audit_run`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        from idml.audit.run import audit_run

        return audit_run(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
