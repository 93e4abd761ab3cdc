"""Data classes to JSON data and back, and what is refused on the way back."""

import json
import math
from dataclasses import dataclass

import pytest

from gpukit.errors import DataError
from gpukit.machine.check import Check, PrecisionCheck
from gpukit.machine.plain import from_plain, to_plain
from gpukit.machine.runtime import Runtime, detect

CHECK = Check("cuda:0", "Tesla T4", True, largest_difference=3e-6, precisions={"fp32": PrecisionCheck(True, True)})


def test_json_is_plain_and_comes_back_equal():
    data = json.loads(json.dumps(CHECK.to_json()))
    assert data["precisions"]["fp32"] == {"works": True, "native": True, "reason": ""}
    assert Check.from_json(data) == CHECK


def test_a_runtime_keeps_tuples_and_nested_records():
    runtime = detect()
    again = Runtime.from_json(json.loads(json.dumps(runtime.to_json())))
    assert again == runtime
    assert isinstance(again.chips, tuple)


def test_whole_numbers_are_taken_for_floats():
    assert Check.from_json({**CHECK.to_json(), "seconds": 2}).seconds == 2.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"works": "yes"}, "Check.works should be bool, not 'yes'"),
        ({"works": 1}, "Check.works should be bool"),
        ({"memory_bytes": 1.5}, "Check.memory_bytes should be int"),
        ({"seconds": "1"}, "Check.seconds should be float"),
        ({"precisions": []}, "Check.precisions should be an object"),
        ({"precisions": {"fp32": {"works": True}}}, "Check.precisions['fp32'] lacks the field 'native'"),
        ({"precisions": {"fp32": None}}, "should be an object"),
        ({"colour": 1}, "has no field 'colour'"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change, words):
    with pytest.raises(DataError) as raised:
        Check.from_json({**CHECK.to_json(), **change})
    assert words in str(raised.value)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(DataError, match="Check should be an object"):
        Check.from_json(data)


def test_a_missing_field_is_named_and_one_with_a_default_is_not_missed():
    data = CHECK.to_json()
    del data["seconds"]
    assert Check.from_json(data).seconds == 0.0
    del data["device"]
    with pytest.raises(DataError, match="lacks the field 'device'"):
        Check.from_json(data)


def test_a_list_that_is_no_list_is_refused():
    with pytest.raises(DataError, match=r"Runtime\.chips should be a list"):
        Runtime.from_json({**detect().to_json(), "chips": "T4"})


def test_a_whole_number_beyond_all_floats_is_named():
    with pytest.raises(DataError, match=r"largest_difference is too large a number"):
        Check.from_json({**CHECK.to_json(), "largest_difference": 10**400})


@dataclass(frozen=True)
class Measured:
    value: float | None
    others: dict[str, float]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_goes_through_strict_json(number):
    written = json.dumps(to_plain(Measured(number, {"a": number})), allow_nan=False)
    read = from_plain(Measured, json.loads(written))
    assert str(read) == str(Measured(number, {"a": number}))
    assert math.isnan(from_plain(Measured, json.loads('{"value": NaN, "others": {}}')).value)  # as it was written once
    with pytest.raises(DataError):
        from_plain(Measured, {"value": "nano", "others": {}})
