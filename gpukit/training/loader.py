"""Batches on the device: resident where the images are small, by DataLoader where they are not."""

from numbers import Integral
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from gpukit.errors import DataError, UsageError
from gpukit.notices import say
from gpukit.training.batch import PINNED
from gpukit.training.host import HostLoader
from gpukit.training.images import ImageSet
from gpukit.training.pairs import Bytes, ImagePairSet
from gpukit.training.resident import ResidentLoader
from gpukit.training.workers import choose_workers, shared_memory_bytes, start_method

__all__ = ["HostLoader", "ResidentLoader", "loader"]

# The share of a device's free memory that images may take; the rest is for the network and its activations.
RESIDENT_SHARE = 0.25
# Where the device does not tell how much is free.
RESIDENT_BYTES = 1 << 30


def loader(
    dataset: Any,
    batch_size: int,
    *,
    device: str | torch.device | None = None,
    shuffle: bool = False,
    augment: bool = False,
    normalize: bool = True,
    drop_last: bool = False,
    seed: int = 0,
    workers: int | None = None,
    resident: bool | None = None,
) -> ResidentLoader | HostLoader:
    """An iterable of batches (x float32 (B, C, H, W), y int64 (B,)) that are already on the device.

    dataset    an ImageSet, an ImagePairSet, or any torch Dataset of (image tensor, class number). Of an ImagePairSet,
               x and y are both images, float32 on the scale 0..1
    device     by default the one that `setup()` chose, or the first that works
    shuffle    a new order every epoch, from (seed, epoch) alone: the same on every device
    augment    ImageSets only: each image is shifted by up to 4 pixels on black, and half of them are flipped sideways
    normalize  ImageSets only: zero mean and unit deviation by the training part's figures; False gives 0..1
    drop_last  leave out the last batch if it is short
    workers    processes of a DataLoader; chosen by default, never more than the CPU cores that this process may use
    resident   True or False to decide it: by default such a set that takes up to a quarter of the device's free
               memory stays there as bytes (on the CPU it already is in memory), and everything else goes through a
               DataLoader

    What was chosen is said once, and is in `.description`. Raises UsageError for arguments that do not fit, a batch
    larger than the data among them, DataError for an empty data set, DeviceError for a device that does not work.
    """
    dataset, batch_size = _checked(dataset, batch_size, augment), int(batch_size)
    device = _device(device)
    stays, why = _stays(dataset, device, resident)
    options = {"shuffle": shuffle, "augment": augment, "normalize": normalize, "drop_last": drop_last, "seed": seed}
    if stays:
        if workers:
            raise UsageError(
                f"workers={workers} has no work.",
                "The images stay on the device, and no process prepares batches.",
                "Leave it out, or take resident=False.",
            )
        description = f"{dataset.name} stays on {device} as bytes, because {why}; resident=False takes a DataLoader"
        made = ResidentLoader(dataset, batch_size, device, description=description, **options)
    else:
        made = _host_loader(dataset, batch_size, device, workers, why, options)
    say(f"loader: {made.description}.")
    return made


def _host_loader(dataset: Any, batch_size: int, device: torch.device, asked: int | None, why: str, options: dict):
    from gpukit.machine.hardware import usable_cores

    count, reason = choose_workers(
        asked,
        dataset,
        accelerated=device.type != "cpu",
        cores=usable_cores(),
        shared_bytes=shared_memory_bytes(),
        forks=start_method() == "fork",
        batches=-(-len(dataset) // batch_size),
    )
    pinned = device.type in PINNED
    name = dataset.name if isinstance(dataset, Bytes) else type(dataset).__name__
    memory = "pinned memory" if pinned else "no pinned memory"
    if device.type == "cuda":
        memory += ", copies beside the computation"
    workers = "1 worker" if count == 1 else f"{count} workers"
    description = f"{name} through a DataLoader to {device}, because {why}; {workers} ({reason}), {memory}"
    if not isinstance(dataset, Bytes):
        description += "; values as the data set gives them"
    return HostLoader(dataset, batch_size, device, workers=count, pinned=pinned, description=description, **options)


def _checked(dataset: Any, batch_size: int, augment: bool) -> Any:
    """The data set, a part of an ImageSet as an ImageSet, after the arguments have been found to fit."""
    if isinstance(dataset, tuple | list) and any(isinstance(part, Bytes) for part in dataset):
        raise UsageError(
            "A loader takes one data set, and this is a pair.",
            "load_dataset() gives the training and the validation set.",
            "Take them apart: `train, valid = load_dataset()`, then a loader for each.",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"A {type(dataset).__name__} has no samples that can be counted and picked.",
            "A loader needs `len(dataset)` and `dataset[i]`.",
            "Give fit() a torch DataLoader of it, or any iterable of batches.",
        )
    if isinstance(dataset, Subset) and isinstance(dataset.dataset, Bytes) and len(dataset):
        dataset = dataset.dataset.select(dataset.indices)
    if len(dataset) == 0:
        raise DataError("The data set is empty.", f"len() of the {type(dataset).__name__} is 0.", "Check its source.")
    if isinstance(batch_size, bool) or not isinstance(batch_size, Integral) or batch_size < 1:
        raise UsageError(f"batch_size={batch_size!r} is no number of samples.", "", "Give a whole number from 1.")
    if batch_size > len(dataset):
        raise UsageError(
            f"A batch of {batch_size:,} is larger than the data set.",
            f"It has {len(dataset):,} samples.",
            f"Take batch_size={len(dataset)} or less, or more data.",
        )
    if augment and not isinstance(dataset, ImageSet):
        raise UsageError(
            f"A {type(dataset).__name__} cannot be augmented here.",
            "gpukit crops and flips the images of an ImageSet alone, not an image and its target alike."
            if isinstance(dataset, ImagePairSet)
            else "gpukit crops and flips the bytes of an ImageSet.",
            "Leave augment out."
            if isinstance(dataset, ImagePairSet)
            else "Put torchvision's RandomCrop and RandomHorizontalFlip into the data set's transform.",
        )
    return dataset


def _stays(dataset: Any, device: torch.device, resident: bool | None) -> tuple[bool, str]:
    """Whether the images stay on the device, and why."""
    from gpukit.machine.backend import memory

    if not isinstance(dataset, Bytes):
        if resident:
            raise UsageError(
                f"A {type(dataset).__name__} cannot stay on the device.",
                "Only an ImageSet or ImagePairSet, images as bytes of one size, can.",
                "Leave `resident` out, or store the images as an .npz and load_dataset() it.",
            )
        return False, "it is not an ImageSet"
    if resident is not None:
        return resident, f"resident={resident}"
    if device.type == "cpu":
        return True, "it is in memory already"
    free = memory(device)[0]
    limit = RESIDENT_BYTES if free is None else RESIDENT_SHARE * free
    share = f"{RESIDENT_SHARE:.0%} of the free memory" if free is not None else f"{RESIDENT_BYTES >> 30} GiB"
    # Class numbers weigh nothing beside images.
    if sum(part.nbytes for part in dataset.parts if part.dtype == torch.uint8) <= limit:
        return True, f"it takes at most {share} there"
    return False, f"it takes more than {share} there"


def _device(device: str | torch.device | None) -> torch.device:
    from gpukit.machine.probe import asked_device, resolve_device
    from gpukit.machine.processes import own_device
    from gpukit.machine.setup import current

    if device is not None:
        return resolve_device(own_device(str(asked_device(device))))
    runtime = current()
    return _device("auto") if runtime is None else torch.device(runtime.device)
