"""Results in JSON files that tell which version of which result they are."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gpukit.errors import DataError
from gpukit.files import read_json, write_whole
from gpukit.machine.plain import from_plain, to_plain


class Filed:
    """A frozen dataclass that goes to JSON and back. A class of its own names itself and its `VERSION`."""

    VERSION = ""
    CALLED = ""

    def to_json(self) -> dict[str, Any]:
        return {"version": self.VERSION, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises DataError for another version or missing parts."""
        found = data.get("version") if isinstance(data, Mapping) else None
        if found != cls.VERSION:
            raise DataError(
                f"This is no {cls.CALLED} that this gpukit can read: its version is {found!r}, not {cls.VERSION!r}.",
                "It was written by another version of gpukit, or is another kind of file.",
                "Read it with the gpukit that wrote it, or measure again.",
            )
        return from_plain(cls, {name: value for name, value in data.items() if name != "version"})

    def save(self, path: str | os.PathLike) -> Path:
        """Write it as JSON; whole, or not at all."""
        return write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        return cls.from_json(read_json(path, cls.CALLED))
