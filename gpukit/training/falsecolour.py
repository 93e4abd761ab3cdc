"""The false-colour task: give an image that was taken in the wrong colours its true colours back.

A false-colour image shows what eyes do not see: an infra-red band in red, the red band in green, the green band in
blue, as infra-red film does. Nothing shows blue. It comes back only because the bands overlap, and the network must
undo their mixing, the sensor's curve, its noise and the blur of the first band. There is no infra-red in a photograph:
the band here is made up from the visible ones. It is bright where green and blue are bright and red is not.

Measured on a CPU: FalseColourNet in batches of 32, five epochs, mean squared error and AdamW at 0.0004 give
`pixel_accuracy(0.1)` of 0.93 on the validation part (0.927 to 0.935 with three seeds), and 0.005 untrained.
"""

from pathlib import Path

import numpy as np
import torch

from gpukit.errors import DataError
from gpukit.training.pairs import ImagePairSet
from gpukit.training.readers import read_arrays

PATCH, STEP = 32, 16
# Each band from the true red, green and blue, in parts of 256. A sum over 255 is cut off, as in a sensor.
MIXING = ((-76, 230, 128), (192, 64, 0), (25, 179, 51))
# A shown value is 255 * (band / 255) ** gamma.
GAMMAS = (0.6, 0.8, 0.7)
# Noise is the sum of four random bytes less its mean, times this, in 256ths of a byte: 6.9 bytes of deviation.
NOISE = 12
SEEDS = {"train": 1, "valid": 2}


def load(path: Path) -> tuple[ImagePairSet, ImagePairSet]:
    """(train, valid) pairs of a false-colour and a true-colour image, uint8 (N, 3, 32, 32), from the squares in `path`.

    Each square of 96 pixels gives 25 patches, one every 16 pixels. A whole square trains or validates, and squares do
    not overlap: no pixel is in both. Raises DataError for a file that is not the one that data/build_falsecolour.py
    writes.
    """
    arrays = read_arrays(path)
    squares, valid = arrays.get("squares"), arrays.get("valid")
    fits = squares is not None and valid is not None and squares.dtype == np.uint8 and squares.ndim == 4
    if not (fits and squares.shape[3] == 3 and valid.shape == squares.shape[:1] and valid.dtype == np.bool_):
        raise DataError(
            f"{path} does not hold the false-colour squares.",
            f"It has: {', '.join(sorted(arrays)) or 'nothing'}.",
            "Install gpukit again.",
        )
    sets = []
    for split, chosen in (("train", ~valid), ("valid", valid)):
        true = patches(squares[chosen])
        false = false_colour(true, SEEDS[split])
        sets.append(ImagePairSet(torch.from_numpy(false), torch.from_numpy(true), "falsecolour", split, str(path)))
    return sets[0], sets[1]


def patches(squares: np.ndarray) -> np.ndarray:
    """uint8 (N, 3, 32, 32), cut from `squares` (M, S, S, 3) every 16 pixels, square by square."""
    starts = range(0, squares.shape[1] - PATCH + 1, STEP)
    cut = np.stack([squares[:, r : r + PATCH, c : c + PATCH] for r in starts for c in starts], axis=1)
    return np.ascontiguousarray(cut.reshape(-1, PATCH, PATCH, 3).transpose(0, 3, 1, 2))


def false_colour(true: np.ndarray, seed: int) -> np.ndarray:
    """The false-colour images, uint8 (N, 3, H, W), of true-colour ones of the same shape.

    Whole numbers and the raw stream of PCG64, which NumPy keeps the same for ever: the same bytes on every machine.
    """
    red, green, blue = (true[:, channel].astype(np.int32) for channel in range(3))
    bands = [np.clip(r * red + g * green + b * blue, 0, 255 * 256) for r, g, b in MIXING]
    bands[0] = blurred(bands[0])
    noise = noise_of(true.shape, seed)
    shown = np.empty_like(true)
    for channel, (band, gamma) in enumerate(zip(bands, GAMMAS, strict=True)):
        curve = (255 * (np.arange(256) / 255) ** gamma).round().astype(np.uint8)
        shown[:, channel] = curve[np.clip((band + NOISE * noise[:, channel]) >> 8, 0, 255)]
    return shown


def blurred(band: np.ndarray) -> np.ndarray:
    """Means of 3x3 pixels, rounded down: infra-red sensors are coarse. The border repeats itself."""
    height, width = band.shape[1:]
    padded = np.pad(band, ((0, 0), (1, 1), (1, 1)), mode="edge")
    return sum(padded[:, r : r + height, c : c + width] for r in range(3) for c in range(3)) // 9


def noise_of(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """int32 of `shape`: sums of four random bytes, less the mean of 510. Deviation 147.8, close to normal."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(seed).random_raw((count + 1) // 2).astype("<u8").view(np.uint8)
    return raw.reshape(-1, 4).sum(1, dtype=np.int32)[:count].reshape(shape) - 510
