"""What results of memory measurements share: JSON both ways, and their views."""

from collections.abc import Mapping
from typing import Any, Self

from gpukit.machine.plain import from_plain, to_plain
from gpukit.views import view


class Shown:
    """A frozen dataclass that goes to JSON and back, and shows itself."""

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises DataError for what is damaged."""
        return from_plain(cls, data)

    def plot(self):
        """As a matplotlib Figure."""
        return view("memory_plots", "plot", self)

    def __str__(self) -> str:
        return view("memory_tables", "text", self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return view("memory_tables", "html", self)
