"""Sizes, durations and tables as messages show them."""

import pytest

from drafter import text


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (4_800, "4.80 KB"),
        (70_000, "70.00 KB"),
        (4_900_000, "4.90 MB"),
        (70_000_000, "70.00 MB"),
        (10**9 // 5, "0.20 GB"),
        (3 * 10**9, "3.00 GB"),
        (2 * 10**12, "2.00 TB"),
    ],
)
def test_a_size_never_reads_as_zero_unless_it_is(count, shown):
    assert text.size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.3, "0.3 s"), (20, "20 s"), (90, "90 s"), (120, "2 min"), (3600, "60 min"), (10_800, "3.0 h")],
)
def test_a_duration_is_shown_in_a_unit_that_fits_it(seconds, shown):
    assert text.duration(seconds) == shown


def test_columns_of_a_table_are_aligned_without_trailing_blanks():
    assert text.table([("run", "size"), ("a", "1 B"), ("longer", "")]) == "run     size\na       1 B\nlonger"
