"""Batches of every shape go to the device and back."""

from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch.utils.data import DataLoader

from gpukit.errors import DataError
from gpukit.training.batch import batch_samples, sample_count, split_batch, split_samples, to_device

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


class Own(MutableMapping):
    """A mapping that a shallow copy would share with the original."""

    def __init__(self, items=()):
        self.items_of = dict(items)

    def __getitem__(self, key):
        return self.items_of[key]

    def __setitem__(self, key, value):
        self.items_of[key] = value

    def __delitem__(self, key):
        del self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


class Named(list):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


MAPPINGS = (dict, OrderedDict, UserDict, MappingProxyType, Own, ChainMap)


@pytest.mark.parametrize("kind", MAPPINGS)
def test_every_kind_of_mapping_moves_is_counted_and_split_and_the_original_stays(kind):
    batch = kind({"x": torch.arange(8.0).view(4, 2), "name": "a batch"})
    moved = to_device(batch, torch.device("meta"))
    assert (type(moved), moved["x"].device.type, batch["x"].device.type) == (kind, "meta", "cpu")
    assert sample_count(batch) == 4
    part = split_samples(batch, 4, 1, 3)
    assert (type(part), part["x"].tolist(), part["name"]) == (kind, [[2.0, 3.0], [4.0, 5.0]], "a batch")
    assert batch["x"].shape == (4, 2)


def test_a_list_of_a_class_of_its_own_keeps_what_else_it_holds():
    moved = to_device(Named("batch 1", [torch.ones(2), "x"]), torch.device("meta"))
    assert (type(moved), moved.name, moved[0].device.type, moved[1]) == (Named, "batch 1", "meta", "x")


def test_strings_that_a_dataloader_leaves_in_a_tuple_are_split_with_their_samples():
    (x, names), _ = next(iter(DataLoader([((torch.ones(2), f"picture {i}"), i) for i in range(4)], batch_size=4)))
    assert type(names) is tuple
    part = split_samples((x, names), 4, 2, 4)
    assert part[0].shape == (2, 2)
    assert part[1] == ("picture 2", "picture 3")
    assert split_samples((torch.ones(2, 3), (224, 224)), 2, 0, 1)[1] == (224, 224)  # a size, and not two samples


@pytest.mark.parametrize("kind", [dict, lambda **parts: list(parts.values())])
def test_a_number_that_goes_along_is_not_taken_for_the_number_of_samples(kind):
    target = kind(temperature=torch.tensor(0.5), labels=torch.zeros(8))
    assert batch_samples(torch.ones(8, 2), target) == 8
    assert batch_samples(torch.ones(3), torch.tensor(1)) == 1


class Given(tuple):
    """Takes its items one by one, as a named tuple does, and has more to it."""

    def __new__(cls, *items):
        return super().__new__(cls, items)


def test_a_tuple_of_a_class_of_its_own_keeps_class_items_and_attributes():
    value = Given(torch.ones(4), "name")
    value.source = "a file"
    for made in (to_device(value, torch.device("meta")), split_samples(value, 4, 0, 2)):
        assert (type(made), len(made), made[1], made.source) == (Given, 2, "name", "a file")
    assert to_device(value, torch.device("meta"))[0].is_meta
    largest = torch.ones(4, 2).max(1)
    assert type(to_device(largest, torch.device("meta"))) is type(largest)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("shapes", [[3, 1, 2], [3, 3, 1], [0, 2, 2], [(), (), ()]])
def test_a_list_of_one_tensor_for_each_sample_counts_and_is_cut_as_such(kind, shapes):
    inputs, target = torch.ones(3, 2), kind(map(torch.zeros, shapes))
    assert batch_samples(inputs, target) == 3
    part = split_samples((inputs, target), 3, 1, 3)
    assert len(part[0]) == 2
    assert [*map(id, part[1])] == [*map(id, target[1:])]


def test_a_list_of_parts_that_hold_all_samples_is_no_list_of_samples():
    heads, inputs = [torch.arange(2), torch.ones(2, 5)], torch.ones(2, 3)
    assert batch_samples(inputs, heads) == 2
    assert batch_samples(torch.ones(8, 3), [torch.ones(8)] * 2) == 8
    assert [len(head) for head in split_samples((inputs, heads), 2, 0, 1)[1]] == [1, 1]
    with pytest.raises(DataError, match="no samples"):
        batch_samples([], [])
    # The time comes first; a pair is not two samples.
    assert [*map(len, split_samples((torch.ones(5, 2), torch.arange(2)), 2, 0, 1))] == [5, 1]
