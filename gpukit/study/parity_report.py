"""What a comparison of devices found, as plain data."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukit.errors import DataError
from gpukit.files import read_json, write_whole
from gpukit.machine.plain import from_plain, to_plain
from gpukit.views import view

VERSION = "gpukit-parity/1"


@dataclass(frozen=True)
class Measured:
    """One quantity of the step, as a device computed it, held against what rounding explains.

    Errors are relative: the norm of the difference from float64 over the norm of the float64 result (L2); for integers
    the share of entries that differ. None stands for a number that is not finite, or for what could not be compared.

    name       the path of the module whose code made it ("" is the model itself; "(loss)" the loss function)
    type       the module's class
    call       which call of the module, from 0
    what       "output", "loss", "input gradient", "gradient", "weight" (after the step), "buffer" (after it)
    error      what this piece added: on the inputs and gradients that it received on the device
    expected   the most that rounding explains of it
    ratio      error / expected: more than 1 is no rounding
    verdict    "rounding", "parts", "not finite", "cut" (the graph), "shape", "missing", "random" (not compared),
               "known" (a habit of the device that the notes tell)
    total_error, total_expected   the same with everything that came before it, from the batch on; for outputs only
    parameter  the name of the parameter or buffer that a "gradient", "weight" or "buffer" belongs to
    """

    name: str
    type: str
    call: int
    what: str
    error: float | None
    expected: float | None
    ratio: float | None
    verdict: str
    total_error: float | None = None
    total_expected: float | None = None
    detail: str = ""
    parameter: str = ""

    @property
    def label(self) -> str:
        """The module as it is called in tables: "layer1.0.relu", its second call "layer1.0.relu (call 2)"."""
        name = self.name or "(the model itself)"
        return f"{name} (call {self.call + 1})" if self.call else name


@dataclass(frozen=True)
class DeviceParity:
    """One device in one precision.

    verdict    "sound": all differences are rounding of this precision; "coarser": they are rounding, of the coarser
               format named in `rounding`; "parts": something computes another thing; "not finite"; "failed": the step
               raised, `sentence` says what; "not judged": the reference raised whenever errors were put in
    layers     a row for each call of a module, in order of execution: its output
    others     loss, input gradients, gradients of parameters, weights and buffers after the step
    first      where it parts first: forward in order of execution, then backward in its order; None if nowhere
    """

    device: str
    device_name: str
    precision: str
    verdict: str
    rounding: str
    sentence: str
    layers: tuple[Measured, ...] = ()
    others: tuple[Measured, ...] = ()
    first: Measured | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing but rounding tells this device from the reference."""
        return self.verdict in ("sound", "coarser")

    @property
    def label(self) -> str:
        return f"{self.device} {self.precision}"


@dataclass(frozen=True, repr=False)
class ParityReport:
    """Whether devices compute the same training step, where they part first, and what that means.

    `reference` says what they were held against, `batch` what was fed. `entries` has one DeviceParity for each device
    and precision. `differences` are differences between the two models before anything was computed.
    """

    model: str
    reference: str
    batch: str
    seed: int
    entries: tuple[DeviceParity, ...]
    differences: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether every device and precision computes what the reference does, up to rounding."""
        return not self.differences and all(entry.sound for entry in self.entries)

    @property
    def first_module(self) -> str | None:
        """The path of the first module that parts, in order of execution ("" is the model itself), or None.

        Of several devices and precisions the finest that parts tells it best: the first one listed.
        """
        found = next((entry.first for entry in self.entries if not entry.sound and entry.first), None)
        if found is None and self.differences:
            found = self.differences[0]
        return None if found is None else found.name

    @property
    def sentence(self) -> str:
        """What was found, in a sentence."""
        bad = [entry for entry in self.entries if not entry.sound]
        if bad:
            more = f" ({len(bad)} of {len(self.entries)} comparisons are not sound.)" if len(self.entries) > 1 else ""
            return bad[0].sentence + more
        if self.differences:
            return self.differences[0].detail
        if len(self.entries) == 1:
            return self.entries[0].sentence
        coarser = [entry.sentence for entry in self.entries if entry.verdict == "coarser"]
        names = ", ".join(entry.label for entry in self.entries)
        return " ".join([f"Sound: {names} compute the same step, up to the rounding of each precision.", *coarser])

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ParityReport":
        """The inverse of `to_json`. Raises DataError for another version or missing parts."""
        found = data.get("version") if isinstance(data, Mapping) else None
        if found != VERSION:
            raise DataError(
                f"This is not a parity report that this gpukit can read: its version is {found!r}, not {VERSION!r}.",
                "It was written by another version of gpukit, or is another kind of file.",
                "Compare again.",
            )
        return from_plain(cls, {name: value for name, value in data.items() if name != "version"})

    def save(self, path: str | os.PathLike) -> Path:
        """Write the report as JSON; whole, or not at all."""
        import json

        return write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ParityReport":
        return cls.from_json(read_json(path, "parity report"))

    def table(self, *, every: bool = False) -> str:
        """The report as text; `every` module, or those that matter."""
        return view("parity_tables", "text", self, every=every)

    def plot(self):
        """Errors by layer against what rounding explains, as a matplotlib Figure."""
        return view("parity_plots", "errors_by_layer", self)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return view("parity_tables", "html", self)
