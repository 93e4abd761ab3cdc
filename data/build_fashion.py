"""Build fashion.npz from the four original files of Fashion-MNIST.

    python data/build_fashion.py [FOLDER OF THE ORIGINALS] [OUTPUT]

The originals are Debian's package dataset-fashion-mnist (in /usr/share/datasets/fashion-mnist) or the four files
named at https://github.com/zalandoresearch/fashion-mnist. Needs NumPy only.
"""

import gzip
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
TRAIN_STEP, TEST_STEP = 6, 5


def read_idx(path: Path) -> np.ndarray:
    """The array in a gzipped idx file: a magic number with the number of axes, their lengths, then the bytes."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">u4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def every(labels: np.ndarray, step: int) -> np.ndarray:
    """Positions of every `step`-th image of each class, counted from its first, in the original order.

    Counting within the classes keeps the part balanced. Spreading it over the whole file keeps the classes as mixed as
    they are there: the first 1,000 of each class would end in a run of the rarest ones.
    """
    rank = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        of_class = labels == label
        rank[of_class] = np.arange(of_class.sum())
    return np.flatnonzero(rank % step == 0)


def select(originals: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for ours, theirs, step in (("train", "train", TRAIN_STEP), ("test", "t10k", TEST_STEP)):
        images = read_idx(originals / f"{theirs}-images-idx3-ubyte.gz")
        labels = read_idx(originals / f"{theirs}-labels-idx1-ubyte.gz")
        chosen = every(labels, step)
        arrays[f"x_{ours}"], arrays[f"y_{ours}"] = images[chosen], labels[chosen]
    return arrays | {"classes": np.array(CLASSES)}


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz compressed with LZMA, a seventh smaller than what `numpy.savez_compressed` writes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            # A fixed date, system and mode: the same bytes wherever and whenever it is built.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, member.getvalue(), compress_type=zipfile.ZIP_LZMA)
    return content.getvalue()


if __name__ == "__main__":
    originals = Path(sys.argv[1]) if len(sys.argv) > 1 else DEBIAN
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("fashion.npz")
    output.write_bytes(pack(select(originals)))
