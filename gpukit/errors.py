"""Errors that say what is there, why, and what to do next."""

import difflib
from collections.abc import Iterable


class GpukitError(Exception):
    """A message in three parts: the fact, its cause, the next action.

    Raise it `from` the exception that led to it, so that the original is kept as the cause.
    """

    def __init__(self, fact: str, cause: str = "", action: str = ""):
        self.fact, self.cause, self.action = fact, cause, action
        super().__init__(" ".join(part for part in (fact, cause, action) if part))

    def __reduce__(self):
        return type(self), (self.fact, self.cause, self.action)


class UsageError(GpukitError, ValueError):
    """An argument that cannot be meant: an unknown name, zero epochs, a batch larger than the data."""


class DataError(GpukitError, ValueError):
    """A data set or a results file that is damaged, of the wrong kind, or not there."""


class DeviceError(GpukitError, RuntimeError):
    """A device that is not there, or is there and cannot be used."""


class TrainingError(GpukitError, RuntimeError):
    """Training cannot go on: the loss is not finite, or the optimiser does not hold the model's parameters."""


class ExportError(GpukitError, RuntimeError):
    """A model that cannot be taken out in the form asked for, or whose other form computes something else."""


class ProcessError(GpukitError, RuntimeError):
    """One of several processes has failed, or could not be started."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the failed process's own traceback is in the message, and where it was raised is not."""
        return f"{type(self).__name__}: {self}".splitlines()


class MissingPackageError(GpukitError, ImportError):
    """An optional package is needed for what was asked."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for a name that is not among `known`, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), [k.lower() for k in known], n=1, cutoff=0.4)
    nearest = next((k for k in known if near and k.lower() == near[0]), None)
    return UsageError(
        f"Unknown {kind} {name!r}.",
        f"Known: {', '.join(known)}." if known else "",
        f"Did you mean {nearest!r}?" if nearest else "",
    )
