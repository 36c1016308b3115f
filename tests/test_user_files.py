"""Files that a user names: regular and bounded, or refused in one line."""

import os
import socket

import pytest

from drafter import config, user_files
from drafter.errors import ConfigError


@pytest.fixture
def special(tmp_path):
    """Paths that are no regular files, by kind."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("/dev/zero")
    return {
        "a named pipe": tmp_path / "pipe",
        "a socket": tmp_path / "socket",
        "a folder": tmp_path,
        "a device": tmp_path / "link",
    }


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a folder", "a device"])
def test_what_is_no_regular_file_is_refused_at_once_by_its_kind(special, kind):
    """Seam I: a fifo waits for ever, /dev/zero eats the memory."""
    with pytest.raises(ConfigError) as refused:
        user_files.open_regular(special[kind])
    assert str(refused.value) == f"{special[kind]} is {kind}, not a regular file"


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a folder", "a device"])
@pytest.mark.parametrize("place", ["--config", "--set"])
def test_a_config_that_is_no_regular_file_is_one_line(special, kind, place):
    """Seam I: as config file and as the file of an override."""
    if place == "--config":
        arguments = (special[kind], [])
    else:
        arguments = (config.ROOT / "configs/smollm2_cpu.yaml", [f"run.seed=@{special[kind]}"])
    with pytest.raises(ConfigError) as refused:
        config.load(*arguments)
    assert f"{special[kind]} is {kind}" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_above_the_bound_is_not_read_whole(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_bytes(b"")
    os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=r"large.yaml has more than 16.00 MB"):
        user_files.read_text(path)


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path):
    (tmp_path / "file").write_text("täxt")
    (tmp_path / "link").symlink_to("file")
    assert user_files.read_text(tmp_path / "file", most=5) == user_files.read_text(tmp_path / "link") == "täxt"
    with pytest.raises(FileNotFoundError):
        user_files.open_regular(tmp_path / "none")
