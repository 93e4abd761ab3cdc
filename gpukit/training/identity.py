"""What a run is: everything that must be the same for a checkpoint of it to be gone on from."""

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from gpukit.machine import backend
from gpukit.training.epochs import Epochs
from gpukit.training.optimizer import KERNELS
from gpukit.training.prepare import Run
from gpukit.training.random_states import unwrapped

Described = dict[str, str]
# Another version of torch may word a module otherwise, or know settings that this one does not.
_BATCHES = "batches of the "
_WORDED_BY_TORCH = ("model: ", "optimiser, group ", "scheduler: ")


def identity(run: Run, train: Any, valid: Any) -> Described:
    """Names to descriptions, of all that shapes the results, as it is before the first step."""
    named = {f"weight {name}": text for name, text in _weights(run.model)}
    named |= dict(_flat("model: ", _model(run.model)))
    named |= dict(_flat("loss: ", describe_loss(run.loss_fn)))
    named |= {"optimiser": type(run.optimizer).__name__, "scheduler": type(run.scheduler).__name__}
    named |= settings(run)
    for part, data in (("training data", train), ("validation data", valid)):
        named |= dict(_flat(f"{part}: ", _data(data)))
    return named | {
        "metrics": ", ".join(run.metrics),
        "precision": run.precision.name,
        "accumulate": str(run.accumulate),
        "clip_norm": str(run.clip_norm),
    }


def settings(run: Run) -> Described:
    """The optimiser's and the scheduler's constants, and what they change: the learning rate, the epoch's number."""
    named = {}
    for number, group in enumerate(run.optimizer.param_groups, start=1):
        values = {name: value for name, value in group.items() if name not in ("params", "param_names", *KERNELS)}
        values["parameters"] = ", ".join("lazy" if is_lazy(p) else str(tuple(p.shape)) for p in group["params"])
        named |= dict(_flat(f"optimiser, group {number}: ", values))
    return named | dict(_flat("scheduler: ", run.scheduler.state_dict() if run.scheduler is not None else {}))


def batches(train: Any, valid: Any, processes: int) -> Described:
    """How samplers cut the data into batches, in this process of so many; they may change it as epochs go by."""
    named = {}
    for part, data in (("training", unwrapped(train)), ("validation", unwrapped(valid))):
        if isinstance(data, DataLoader):
            sampler = data.sampler if data.batch_sampler is None else data.batch_sampler
            cut = {name: getattr(sampler, name, None) for name in ("batch_size", "drop_last")}
            with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
                cut["number"] = len(sampler)
            named[f"{_BATCHES}{part} data (processes: {processes})"] = describe(cut)
    return named


def differences(there: Described, then: Described, here: Described, same_torch: bool) -> list[str]:
    """What is not the same, in words. `then` are the settings at the save, which those that trained before have."""
    found = []
    models = [any(name.startswith("model: ") for name in described) for described in (there, here)]
    same_torch = same_torch and all(models)  # lazy modules say what they are after the first batch
    for name in {**there, **here}:
        if name.startswith(_BATCHES) and not (name in there and name in here):
            continue  # of another number of processes, or of a gpukit that did not compare them
        worded = name.startswith(_WORDED_BY_TORCH)
        if worded and not same_torch and (name.startswith("model: ") or name not in there or name not in here):
            continue
        mine, theirs = here.get(name), there.get(name)
        if mine != theirs and mine != then.get(name, theirs) and not _lazy(mine, theirs):
            found.append(f"{name} was {_shown(theirs)}, and is {_shown(mine)} now")
    return found


def machine(run: Run, train: Any, processes: int) -> Described:
    """What may change the last bits, or what a device draws, and nothing else."""
    train = unwrapped(train)
    return {
        "device": f"{run.device.type} ({backend.device_name(run.device)})",
        "torch": str(torch.__version__),
        "CPU threads": str(torch.get_num_threads()),
        "processes": str(processes),
        "workers": str(getattr(train, "num_workers", None) if isinstance(train, DataLoader) else None),
        "optimiser's kernels": str([{k: g.get(k) for k in KERNELS} for g in run.optimizer.param_groups[:1]]),
    }


def inexact(train: Any) -> str | None:
    """Why a run that goes on may not see the data that it would have seen, or None."""
    train = unwrapped(train)
    if isinstance(train, DataLoader):
        if train.num_workers and train.persistent_workers:
            return (
                "the DataLoader's persistent_workers draw on from epoch to epoch, and nothing outside them knows where "
                "they are; without persistent_workers=True it is exact"
            )
        if not getattr(train, "in_order", True):
            return "the DataLoader's in_order=False gives batches as they are ready"
        if isinstance(train.dataset, IterableDataset):
            train = () if train.num_workers else train.dataset  # workers draw from generators of their own
        else:
            parts = [part for part in (train.batch_sampler, train.sampler) if part is not None]
            train = next((part for part in parts if not type(part).__module__.startswith("torch.")), ())
    if not isinstance(train, list | tuple) and not hasattr(train, "starting_at"):
        return (
            f"a {type(train).__name__} is started anew, and its first batches are left out; it is exact if random "
            "generators alone shape what it gives, and its order is drawn at its start or from a generator of its own"
        )
    return None


def describe_loss(loss: Any) -> dict[str, Any]:
    if not isinstance(loss, nn.Module):
        return {"function": loss}
    public = {name: value for name, value in vars(loss).items() if name[0] != "_" and name != "training"}
    return {"class": type(loss).__name__, **public, **dict(loss.named_buffers())}


def _model(model: nn.Module) -> dict[str, Any]:
    if any(map(is_lazy, model.parameters())):
        return {}  # it becomes another one with its first batch
    lines = re.sub(r" at 0x[0-9a-f]+", "", str(model)).splitlines()
    return {f"line {number}": line.strip() for number, line in enumerate(lines, start=1)}


def _weights(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        form = "lazy" if is_lazy(tensor) else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        yield name, form + (" frozen" if frozen else "")


def _data(data: Any) -> dict[str, Any]:
    data = unwrapped(data)
    if data is None:
        return {"loader": None}
    if isinstance(data, Epochs):  # resident or not: the batches are the same
        names = ("batch_size", "shuffle", "augment", "normalize", "drop_last", "seed")
        return {"loader": "gpukit.loader", **{name: getattr(data, name) for name in names}, **_dataset(data.dataset)}
    if isinstance(data, DataLoader):
        sampler = data.sampler if data.batch_size is not None else data.batch_sampler
        found = {"loader": "DataLoader", "sampler": type(sampler).__name__, **_dataset(data.dataset)}
        found |= {"batch_size": data.batch_size, "drop_last": data.drop_last}
        generators = (getattr(holder, "generator", None) for holder in (data, sampler))
        seed = next((g.initial_seed() for g in generators if isinstance(g, torch.Generator)), None)
        return {**found, "seed": seed}
    return {"loader": type(data).__name__, "batches": len(data) if hasattr(data, "__len__") else None}


def _dataset(dataset: Any) -> dict[str, Any]:
    samples = len(dataset) if hasattr(dataset, "__len__") else None
    return {"data set": getattr(dataset, "name", None) or type(dataset).__name__, "samples": samples}


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            for number, part in enumerate(value, start=1):  # SequentialLR holds others
                yield from _flat(f"{prefix}{name} {number}, ", part)
        elif name != "_last_lr":  # the optimiser's groups say it
            yield f"{prefix}{name}", describe(value)


def describe(value: Any) -> str:
    """A constant by its value, anything else by its name: what functions compute is not compared."""
    if isinstance(value, torch.Tensor):
        values = value.tolist()
        if not value.dim():
            return describe(values)
        long = f"{tuple(value.shape)} with the checksum {hashlib.sha256(str(values).encode()).hexdigest()[:12]}"
        return describe(values) if value.numel() <= 16 else long
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {describe(item)}' for key, item in value.items())}}}"
    if isinstance(value, np.ndarray | np.generic):
        return describe(torch.as_tensor(value)) if value.dtype.kind in "biuf" else str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # lr=1 is lr=1.0
    if value is None or isinstance(value, bool | int | float | complex | str):
        return str(value)
    if isinstance(value, functools.partial):
        return f"{describe(value.func)} of {describe(value.args)} {describe(value.keywords)}"
    return getattr(value, "__qualname__", type(value).__name__)


def _lazy(mine: str | None, theirs: str | None) -> bool:
    return mine is not None and theirs is not None and ("lazy" in mine or "lazy" in theirs)


def _shown(text: str | None) -> str:
    return "not there" if text is None else text or "nothing"
