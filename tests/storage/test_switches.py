"""Words that switch something on, and cuFile's configuration."""

from __future__ import annotations

import pytest

from shardkit.storage.switches import config_switch, flag

CUFILE = """{
    // a line of comment: "allow_compat_mode": false
    "logging": {"dir": "/var//log", "level": "ERROR"},  /* and
    another */
    "properties": {
        "max_direct_io_size_kb" : 16384, // unit 4k
        "allow_compat_mode": true,
        "use_pci_p2pdma": false,
        "use_rdma": false,
    },
    "block": {"nvme": {"use_pci_p2pdma": true}}
}"""


def test_a_configuration_of_cufile_is_read_with_its_comments():
    assert config_switch(CUFILE, "allow_compat_mode") is True
    assert config_switch(CUFILE, "use_pci_p2pdma") is True
    assert config_switch(CUFILE, "use_rdma") is False
    assert config_switch(CUFILE, "dir") is None


@pytest.mark.parametrize("text", ["{", "{'a': 1}", "x", '{"a": // }'])
def test_what_is_no_configuration_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        config_switch(text, "a")


@pytest.mark.parametrize(("word", "value"), [("ON", True), ("Y", True), ("0", False), ("AUTO", None), ("", None)])
def test_a_switch_has_many_words(word, value):
    assert flag(word) is value
