"""The controlled variables: everything that two runs must share before their seconds may be compared."""

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from gpukit.errors import DataError, UsageError, unknown_name
from gpukit.machine.plain import from_plain
from gpukit.machine.seeds import check_seed

LOADERS = ("published", "resident")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "auto")
NETWORKS = ("SmallCNN",)
OPTIMISERS = ("SGD",)
LOSSES = ("cross-entropy",)

# How much of a data set a bench takes unless told otherwise. Half of the embedded set is ten epochs by each loop in
# two to three minutes on two slow CPU cores; the number belongs to the results, so that machines stay comparable.
BENCH_IMAGES = {"fashion": 5_000}

# What the study varies on purpose within one machine. Every other field of Experiment is controlled.
VARIED = ("loader", "precision")


@dataclass(frozen=True)
class Experiment:
    """One piece of work, described whole: the same on every machine, so that only the hardware differs.

    data              name of the set for `gpukit.load_dataset`; after a run, the name of the set that was used
    checksum          SHA-256 over the training and test images and labels that are used; None: filled in by the run
    train_images      how many training images are used, the first ones of the set; None: all
    valid_images      the same for the test pass; None: all, or as many as keep the set's proportion
    network           the model, by its name in `gpukit.models`
    batch_size        images a step
    epochs            passes over the training images, each followed by a test pass
    warmup_epochs     the first epochs, whose times are kept but left out of the mean
    optimiser, learning_rate, loss
    seed              of the first weights (and of the order, with shuffle)
    loader            "published": DataLoader over PIL images, as in the published experiment;
                      "resident": gpukit's own path, the images as uint8 on the device
    precision         "fp32", "tf32", "bf16", "fp16", or "auto", which a run replaces by what it chose
    shuffle           whether the images come in a new order each epoch
    normalize         whether mean and standard deviation of the set are taken out

    Raises UsageError for values that cannot be meant.
    """

    data: str = "fashion"
    checksum: str | None = None
    train_images: int | None = None
    valid_images: int | None = None
    network: str = "SmallCNN"
    batch_size: int = 64
    epochs: int = 10
    warmup_epochs: int = 2
    optimiser: str = "SGD"
    learning_rate: float = 0.01
    loss: str = "cross-entropy"
    seed: int = 0
    loader: str = "published"
    precision: str = "fp32"
    shuffle: bool = False
    normalize: bool = False

    def __post_init__(self):
        for name, known in (
            ("network", NETWORKS),
            ("optimiser", OPTIMISERS),
            ("loss", LOSSES),
            ("loader", LOADERS),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        for name, least in (("batch_size", 1), ("epochs", 1), ("warmup_epochs", 0)):
            _whole_number(name, getattr(self, name), least)
        for name in ("train_images", "valid_images"):
            if getattr(self, name) is not None:
                _whole_number(name, getattr(self, name), 1)
        check_seed(self.seed)
        if self.warmup_epochs >= self.epochs:
            raise UsageError(
                f"{self.warmup_epochs} warm-up epochs of {self.epochs} leave none to measure.",
                "The warm-up is left out of the mean.",
                "Take more epochs, or a shorter warm-up.",
            )
        rate = self.learning_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate <= 0:
            raise UsageError(f"learning_rate is {rate!r}.", "A step needs a positive number.", "Try 0.01.")
        if self.train_images is not None:
            self._check_batch(self.train_images)
        if self.loader == "published":
            self._check_published()

    def _check_batch(self, images: int) -> None:
        if self.batch_size > images:
            raise UsageError(
                f"A batch of {self.batch_size} is larger than the data: {images} training images.",
                "Not one full step could be made.",
                "Take a smaller batch_size, or more images.",
            )

    def _check_published(self) -> None:
        asked = [f"{name}=True" for name in ("shuffle", "normalize") if getattr(self, name)]
        asked += [f"precision={self.precision!r}"] if self.precision != "fp32" else []
        if asked:
            raise UsageError(
                f"The experiment as published knows no {' and no '.join(asked)}.",
                "It reads the images in their stored order, by ToTensor alone, and computes in fp32.",
                'Use loader="resident" for that.',
            )

    def on(self, train: Any, valid: Any) -> tuple["Experiment", Any, Any]:
        """This experiment completed by the data it runs on, and the two parts of the data that it uses.

        `train` and `valid` are ImageSets, images (N, 3, 32, 32). Raises UsageError when they don't fit, DataError when
        the experiment names a checksum and the data has another.
        """
        from gpukit.training.pairs import ImagePairSet  # brings torch, which the command line does without

        if isinstance(train, ImagePairSet):
            raise UsageError(
                f"The data {train.name!r} are pairs of images.",
                "The controlled experiment sorts images into classes.",
                'Use labelled images, such as data="fashion".',
            )
        train_images = len(train) if self.train_images is None else self.train_images
        # Keeping the proportion keeps the share of the test pass in an epoch.
        share = max(1, round(len(valid) * min(1, train_images / len(train))))
        valid_images = share if self.valid_images is None else self.valid_images
        for name, wanted, there in (("train_images", train_images, train), ("valid_images", valid_images, valid)):
            if wanted > len(there):
                raise UsageError(f"{name} is {wanted:,}.", f"The set has {len(there):,}.", "Take fewer.")
        self._check_batch(train_images)
        train, valid = train.take(train_images), valid.take(valid_images)
        shape = tuple(train.images.shape[1:])
        if shape != (3, 32, 32):
            raise UsageError(
                f"The images of {train.name!r} are {'x'.join(map(str, shape))}.",
                f"{self.network} takes 3x32x32.",
                "Use images of that size.",
            )
        checksum = _checksum(train, valid)
        if self.checksum is not None and self.checksum != checksum:
            raise DataError(
                f"The data {train.name!r} here is not the data of the experiment.",
                f"Its checksum begins with {checksum[:12]}, the experiment's with {self.checksum[:12]}.",
                "Take the same data set and the same number of images.",
            )
        complete = dataclasses.replace(
            self, data=train.name, checksum=checksum, train_images=train_images, valid_images=valid_images
        )
        return complete, train, valid

    @property
    def loop(self) -> str:
        """What a table calls this way of doing the work: "published", "gpukit fp32", "gpukit bf16"."""
        return "published" if self.loader == "published" else f"gpukit {self.precision}"

    @property
    def controlled(self) -> dict[str, Any]:
        """The variables that two runs must share to be comparable: all but `loader` and `precision`."""
        return {name: value for name, value in self.to_json().items() if name not in VARIED}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Any) -> "Experiment":
        """Read `to_json` back. Raises DataError where a field is missing, of the wrong type, or cannot be."""
        # Not even a field with a default may be missing: it would come back as a value that nobody ran with.
        missing = [
            field.name for field in dataclasses.fields(cls) if isinstance(plain, dict) and field.name not in plain
        ]
        if missing:
            raise DataError(f"The experiment has no {missing[0]!r}.", "The file was changed by hand.", "Measure again.")
        try:
            return from_plain(cls, plain)
        except UsageError as error:
            raise DataError(f"The experiment cannot be: {error}", "", "Measure again.") from error


def _whole_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}.", f"It must be a whole number of at least {least}.")


def _checksum(train: Any, valid: Any) -> str:
    return hashlib.sha256(f"{train.checksum} {valid.checksum}".encode()).hexdigest()
