"""The examples in the documents are true."""

import doctest

from drafter import config


def test_every_example_of_the_data_formats_holds():
    path = config.ROOT / "docs/data_formats.md"
    result = doctest.testfile(str(path), module_relative=False, encoding="utf-8")
    assert result.attempted > 10
    assert result.failed == 0
