"""The error tree: one line each, with every field, across process borders too."""

from __future__ import annotations

import errno
import pickle

import pytest

from shardkit import errors
from shardkit.errors import ConfigError, StorageError, TargetFullError, from_os_error

CLASSES = [value for name in errors.__all__ if isinstance(value := getattr(errors, name), type)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_crosses_a_process_border_whole(cls):
    error = cls("it broke", path=b"a\xff\n", offset=512, key="k", expected=1, found=2, kept="all", remedy="go", errno=5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert (copy.path, copy.offset, copy.errno, copy.exit_code) == (b"a\xff\n", 512, 5, cls.exit_code)


def test_an_error_is_one_line_with_its_place_first():
    error = ConfigError(
        "no such thing", path="a\n\x1b[31mb", offset=0, key="k\r", expected="x", found="y", remedy="do z"
    )
    assert str(error) == "no such thing: a\\n\\x1b[31mb:0 [sample k\\r]; expected x; found y; do z"


@pytest.mark.parametrize(
    ("number", "cls"),
    [
        (errno.ENOSPC, TargetFullError),
        (errno.EDQUOT, TargetFullError),
        (errno.EFBIG, TargetFullError),
        (errno.EROFS, StorageError),
        (errno.EACCES, StorageError),
        (errno.EPERM, StorageError),
        (errno.EIO, StorageError),
        (errno.ESTALE, StorageError),
    ],
)
def test_the_system_s_errors_become_ours_with_their_number(number, cls):
    error = from_os_error(OSError(number, "words", "/from/the/system"), "cannot write")
    assert type(error) is cls
    assert error.errno == number
    assert "/from/the/system" in str(error)
    assert errno.errorcode[number] in str(error)


def test_builtin_handlers_catch_what_they_used_to():
    assert isinstance(ConfigError("x"), ValueError)
    assert isinstance(StorageError("x"), OSError)
    assert isinstance(TargetFullError("x"), OSError)
