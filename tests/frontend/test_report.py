"""The report of a bench."""

import re

import pytest

from gpukit.errors import UsageError
from gpukit.frontend import report
from gpukit.study.bench import Failure
from gpukit.study.compare import compare
from gpukit.study.reference import PUBLISHED


@pytest.fixture
def comparison(make_result):
    return compare([make_result("cuda:0"), make_result("cuda:0", loader="resident"), make_result("cpu")])


def test_report_and_plot_lie_beside_each_other(comparison, tmp_path):
    written, image = report.write(tmp_path, comparison)
    text = written.read_text(encoding="utf-8")
    (target,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert tmp_path / target == image
    assert image.read_bytes()[:4] == b"\x89PNG"


def test_a_report_says_what_was_measured_on_what(comparison):
    text = report.text(comparison)
    result = comparison.rows[0].result
    for value in result.machine.versions.values():
        assert value in text
    assert "driver 550.54.15" in text
    assert result.experiment.checksum in text
    for name in result.experiment.controlled:
        assert f"- `{name}`: " in text
    assert "Measured 2026-01-02 03:04 UTC" in text


def test_a_report_has_every_row_of_the_tables_and_each_machine_once(comparison):
    text = report.text(comparison)
    assert text.count("| published |") == 4, "two rows in each of two tables"
    assert text.count("**cuda:0** Tesla T4") == 1
    assert "- **cpu** Intel" in text


def test_the_published_rows_are_marked_as_measured_elsewhere(comparison):
    section = report.text(comparison).split("## Published rows")[1]
    assert "**not here**" in section.split("##")[0]
    for row in PUBLISHED:
        assert f"| {row.hardware} | {row.place} | {row.seconds_per_epoch:.2f} |" in section


def test_what_could_not_be_run_is_in_the_report(comparison):
    failure = Failure("cuda:1", "every loop", "This torch has no code for sm_60.", "Choose a T4.")
    assert "- cuda:1, every loop: This torch has no code for sm_60. Choose a T4." in report.text(comparison, (failure,))
    assert "could not be run" not in report.text(comparison)


def test_a_report_tells_how_to_compare_with_another_machine(comparison):
    assert "python -m gpukit compare results.json" in report.text(comparison)


def test_an_unwritable_folder_is_a_usage_error(comparison, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="Cannot write"):
        report.write(tmp_path / "file" / "folder", comparison)
