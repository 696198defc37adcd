"""numpy, imported when the first of its names is used.

Its import takes 50 ms, a fifth of the conversion of 100M parameters, and what is only copied needs none of it.
"""

from __future__ import annotations

from typing import Any


class _Late:
    def __getattr__(self, name: str) -> Any:
        import numpy

        value = getattr(numpy, name)
        setattr(self, name, value)
        return value


np: Any = _Late()
