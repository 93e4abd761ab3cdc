"""Build falsecolour.npz, the squares of six photographs that the false-colour task is cut from.

    python data/build_falsecolour.py [OUTPUT]

The photographs come with scikit-image (pip install scikit-image), where `skimage.data` names their licences. All six
are in the public domain or under CC0; README.md lists them.
"""

import sys
from pathlib import Path

import numpy as np
from build_fashion import pack
from skimage import data

# By how much each is made smaller: the last two are large, and their structure is coarse.
PHOTOGRAPHS = {"astronaut": 1, "chelsea": 1, "coffee": 1, "rocket": 1, "retina": 2, "hubble_deep_field": 2}
SIDE = 96
# Every fifth square validates. Within a photograph five squares in a row then hold one, whatever its width.
VALID_EVERY = 5
# The black around the eye's round picture shows nothing.
DARKEST_MEAN = 8


def smaller(photograph: np.ndarray, times: int) -> np.ndarray:
    """Means of squares of `times` x `times` pixels, rounded."""
    height, width = (length // times * times for length in photograph.shape[:2])
    parts = photograph[:height, :width].astype(np.uint32).reshape(height // times, times, width // times, times, 3)
    return ((parts.sum((1, 3)) + times * times // 2) // times**2).astype(np.uint8)


def squares(photograph: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """(row, column, pixels) of each square that shows something; squares touch and never overlap."""
    height, width = photograph.shape[:2]
    places = [(r, c) for r in range(0, height - SIDE + 1, SIDE) for c in range(0, width - SIDE + 1, SIDE)]
    cut = [(row, column, photograph[row : row + SIDE, column : column + SIDE]) for row, column in places]
    return [square for square in cut if square[2].mean() >= DARKEST_MEAN]


def build() -> dict[str, np.ndarray]:
    pixels, photographs, places, valid = [], [], [], []
    for number, (name, times) in enumerate(PHOTOGRAPHS.items()):
        for position, (row, column, square) in enumerate(squares(smaller(getattr(data, name)()[..., :3], times))):
            pixels.append(square)
            photographs.append(number)
            places.append((row, column))
            valid.append(position % VALID_EVERY == VALID_EVERY // 2)
    return {
        "squares": np.stack(pixels),
        "photograph": np.array(photographs, np.uint8),
        "place": np.array(places, np.uint16),
        "valid": np.array(valid, np.bool_),
        "photographs": np.array(list(PHOTOGRAPHS)),
    }


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("falsecolour.npz")
    output.write_bytes(pack(build()))
