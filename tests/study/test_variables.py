"""The controlled variables, and what they refuse."""

import json
from dataclasses import replace

import pytest

from gpukit.errors import DataError, UsageError
from gpukit.study.variables import Experiment


@pytest.mark.parametrize(
    ("wrong", "part_of_message"),
    [
        ({"epochs": 0, "warmup_epochs": 0}, "epochs is 0"),
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"epochs": True}, "epochs is True"),
        ({"epochs": 3, "warmup_epochs": 3}, "leave none to measure"),
        ({"epochs": 3, "warmup_epochs": 7}, "leave none to measure"),
        ({"warmup_epochs": -1}, "warmup_epochs is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"train_images": 63}, "A batch of 64 is larger than the data: 63"),
        ({"train_images": 0}, "train_images is 0"),
        ({"valid_images": 0}, "valid_images is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": -0.1}, "learning_rate is -0.1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"learning_rate": "0.01"}, "learning_rate is '0.01'"),
        ({"seed": -1}, "The seed -1"),
        ({"seed": 2**32}, "The seed 4294967296"),
        ({"loader": "publishd"}, "Did you mean 'published'?"),
        ({"loader": "resident", "precision": "bf61"}, "Did you mean 'bf16'?"),
        ({"network": "smallcnn"}, "Did you mean 'SmallCNN'?"),
        ({"optimiser": "sgd"}, "Did you mean 'SGD'?"),
        ({"loss": "cross entropy"}, "Did you mean 'cross-entropy'?"),
        ({"precision": "bf16"}, "no precision='bf16'"),
        ({"shuffle": True}, "no shuffle=True"),
        ({"shuffle": True, "normalize": True}, "no shuffle=True and no normalize=True"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(wrong, part_of_message):
    with pytest.raises(UsageError) as refused:
        Experiment(**wrong)
    assert part_of_message in str(refused.value)


def test_the_shortest_experiment_has_one_epoch_and_no_warm_up():
    assert Experiment(epochs=1, warmup_epochs=0, batch_size=1, train_images=1).epochs == 1


def test_an_experiment_comes_back_from_json_as_it_was():
    experiment = Experiment(loader="resident", precision="bf16", shuffle=True, train_images=500, checksum="ab")
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


@pytest.mark.parametrize("missing", list(Experiment().to_json()))
def test_no_variable_may_be_missing_in_json_lest_a_default_stand_in_for_it(missing):
    plain = Experiment().to_json()
    del plain[missing]
    with pytest.raises(DataError, match=missing):
        Experiment.from_json(plain)


@pytest.mark.parametrize(("name", "value"), [("epochs", "10"), ("epochs", 0), ("shuffle", 1), ("learning_rate", None)])
def test_a_variable_of_the_wrong_type_or_size_in_json_is_a_data_error(name, value):
    with pytest.raises(DataError, match=name):
        Experiment.from_json(Experiment().to_json() | {name: value})


def test_on_fills_in_what_the_data_is(small_set):
    experiment, train, valid = Experiment(batch_size=32).on(small_set, small_set.take(48))
    assert (experiment.data, experiment.train_images, experiment.valid_images) == ("small", 96, 48)
    assert len(experiment.checksum) == 64
    assert (len(train), len(valid)) == (96, 48)


def test_a_part_of_the_training_images_takes_the_same_part_of_the_test_images(small_set):
    experiment, train, valid = Experiment(batch_size=8, train_images=24).on(small_set, small_set.take(48))
    assert (len(train), len(valid)) == (experiment.train_images, experiment.valid_images) == (24, 12)


def test_the_checksum_tells_other_images_and_other_test_images_apart(small_set):
    def checksum(train, valid):
        return Experiment(batch_size=8).on(train, valid)[0].checksum

    base = checksum(small_set, small_set.take(48))
    assert base == checksum(small_set, small_set.take(48))
    assert base != checksum(small_set.take(95), small_set.take(48))
    assert base != checksum(small_set, small_set.take(47))


def test_an_experiment_refuses_other_data_than_its_own(small_set):
    mine, *_ = Experiment(batch_size=8).on(small_set, small_set)
    assert mine.on(small_set, small_set)[0] == mine
    brighter = replace(small_set, images=small_set.images // 2)
    with pytest.raises(DataError, match="is not the data of the experiment"):
        mine.on(brighter, small_set)


@pytest.mark.parametrize(
    ("asked", "part_of_message"),
    [
        ({"batch_size": 97}, "A batch of 97 is larger than the data: 96"),
        ({"train_images": 97}, "train_images is 97"),
        ({"valid_images": 49}, "valid_images is 49"),
    ],
)
def test_more_than_the_data_has_is_refused(small_set, asked, part_of_message):
    with pytest.raises(UsageError, match=part_of_message):
        Experiment(**asked).on(small_set, small_set.take(48))


def test_images_that_the_network_cannot_take_are_refused(small_set):
    grey = replace(small_set, images=small_set.images[:, :1], mean=(), std=())
    with pytest.raises(UsageError, match="1x32x32"):
        Experiment(batch_size=8).on(grey, grey)


def test_only_loader_and_precision_are_varied():
    experiment = Experiment()
    assert set(experiment.to_json()) - set(experiment.controlled) == {"loader", "precision"}
    assert Experiment(loader="resident", precision="fp16").loop == "gpukit fp16"
    assert experiment.loop == "published"
