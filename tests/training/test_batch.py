"""Batches of every shape go to the device and back."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from gpukit.errors import DataError
from gpukit.training.batch import batch_samples, sample_count, split_batch, to_device

Pair = namedtuple("Pair", "image mask")


@dataclass
class Sample:
    image: torch.Tensor
    name: str


def nested():
    x = torch.ones(4, 2)
    return {"a": x, "b": [x, (x, Pair(x, x))], "c": Sample(x, "kept"), "d": "text", "e": None, "f": 3}


def test_every_tensor_in_a_nested_batch_moves_and_the_rest_stays():
    moved = to_device(nested(), torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta and moved["b"][1][0].is_meta
    assert isinstance(moved["b"][1][1], Pair) and moved["b"][1][1].mask.is_meta
    assert moved["c"].image.is_meta and moved["c"].name == "kept"
    assert (moved["d"], moved["e"], moved["f"]) == ("text", None, 3)


def test_a_tensor_that_is_there_already_is_not_copied():
    x = torch.ones(3)
    assert to_device(x, torch.device("cpu")) is x


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ({"x": torch.zeros(3, 2)}, 3),
        ((None, [torch.zeros(7)]), 7),
        (Sample(torch.zeros(2, 9), "x"), 2),
        ("text", 0),
        ([], 0),
    ],
)
def test_samples_are_counted_wherever_the_first_tensor_is(value, count):
    assert sample_count(value) == count


def test_a_pair_is_split():
    assert split_batch(["x", "y"]) == ("x", "y")


@pytest.mark.parametrize("batch", [(1, 2, 3), [1], torch.zeros(2, 3), {"x": 1, "y": 2}, None])
def test_what_is_no_pair_is_refused_by_name(batch):
    with pytest.raises(DataError, match="not a pair"):
        split_batch(batch)


def test_what_can_move_itself_does():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device((packed, torch.Size([2, 3])), torch.device("meta"))
    assert moved[0].data.is_meta and not moved[0].batch_sizes.is_meta  # the lengths must stay on the CPU
    assert moved[1] == torch.Size([2, 3])


def test_a_batch_counts_its_targets_or_else_its_inputs():
    assert batch_samples(torch.zeros(6), torch.zeros(5)) == 5
    assert batch_samples({"x": torch.zeros(6)}, None) == 6
    for nothing in (torch.zeros(0, 3), None, "text"):
        with pytest.raises(DataError, match="no samples"):
            batch_samples(nothing, nothing)
