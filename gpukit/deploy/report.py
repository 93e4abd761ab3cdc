"""What a comparison of forms found, as plain data."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gpukit.deploy.latency import Latency
from gpukit.errors import DataError, unknown_name
from gpukit.files import read_json, write_whole
from gpukit.machine.plain import from_plain, to_plain
from gpukit.views import view

VERSION = "gpukit-exports/1"


@dataclass(frozen=True)
class Form:
    """One form of the model, or why it is not there.

    bytes         the size of its file or files: of the saved weights where the form is a model in memory
    latency       an entry for each batch size
    score         the metric over the validation data
    same_class    share of the validation samples that get the class that the model itself gives
    absolute, relative   largest difference from the model's output on fresh inputs, and over the largest output
    missing       why it could not be had or run; nothing else was measured then
    """

    name: str
    device: str = ""
    bytes: int | None = None
    latency: tuple[Latency, ...] = ()
    score: float | None = None
    same_class: float | None = None
    absolute: float | None = None
    relative: float | None = None
    detail: str = ""
    missing: str = ""


@dataclass(frozen=True, repr=False)
class ExportComparison:
    """Forms of one model side by side; the first is the model itself. `rounding` is what it errs by against float64."""

    model: str
    parameters: int
    device_name: str
    threads: int
    versions: dict[str, str]
    metric: str
    samples: int
    rounding: float | None
    forms: tuple[Form, ...]

    def __getitem__(self, name: str) -> Form:
        forms = {form.name: form for form in self.forms}
        if name not in forms:
            raise unknown_name("form", name, forms)
        return forms[name]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ExportComparison":
        """The inverse of `to_json`. Raises DataError for another version or missing parts."""
        found = data.get("version") if isinstance(data, Mapping) else None
        if found != VERSION:
            raise DataError(
                f"This is not a comparison of exports that this gpukit can read: its version is {found!r}.",
                "",
                "Compare again.",
            )
        return from_plain(cls, {name: value for name, value in data.items() if name != "version"})

    def save(self, path: str | os.PathLike) -> Path:
        """Write the comparison as JSON; whole, or not at all."""
        return write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ExportComparison":
        return cls.from_json(read_json(path, "comparison of exports"))

    def table(self) -> str:
        """The forms as a text table."""
        return view("export_tables", "text", self)

    def plot(self):
        """Latency, size and accuracy of the forms, as a matplotlib Figure."""
        return view("export_plots", "forms", self)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return view("export_tables", "html", self)


@dataclass(frozen=True, repr=False)
class Converted:
    """A model in another form, `model`, and that form beside the model itself, `comparison`."""

    model: nn.Module
    form: str
    detail: str
    comparison: ExportComparison

    def __str__(self) -> str:
        return f"{self.form}: {self.detail}\n{self.comparison}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.comparison._repr_html_()
