"""What the texts of /proc, /sys and /etc say."""

from __future__ import annotations

import pytest

from shardkit.diagnosing.texts import (
    build_options,
    config_switches,
    container_kind,
    cpu_count,
    driver_of,
    field,
    flag,
    iommu_words,
    meminfo,
    quota,
    registry_words,
)

CUFILE = """{
    // a line of comment: "allow_compat_mode": false
    "logging": {"dir": "/var//log", "level": "ERROR"},  /* and
    another */
    "properties": {
        "max_direct_io_size_kb" : 16384, // unit 4k
        "allow_compat_mode": true,
        "use_pci_p2pdma": false,
    },
    "block": {"nvme": {"use_pci_p2pdma": true}}
}"""


def test_a_configuration_of_cufile_is_read_with_its_comments():
    assert config_switches(CUFILE, "allow_compat_mode") == [True]
    assert config_switches(CUFILE, "use_pci_p2pdma") == [False, True]
    assert config_switches(CUFILE, "dir") == []


@pytest.mark.parametrize("text", ["{", "{'a': 1}", "x", '{"a": // }'])
def test_what_is_no_configuration_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        config_switches(text, "a")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15\nGCC version: gcc 12",
         ("535.183.01", False)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (u@h)", ("580.159", True)),
        ("", ("", None)),
        ("NVRM version: something else", ("", None)),
    ],
)  # fmt: skip
def test_the_driver_says_its_version_and_whether_it_is_open(text, version):
    assert driver_of(text) == version


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("400000 100000", 4.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("-1 100000", None),
        ("1 0", None),
        ("", None),
    ],
)
def test_a_quota_is_a_number_of_processors(text, limit):
    assert quota(text) == limit


@pytest.mark.parametrize(("text", "count"), [("0-1,4-7", 6), ("0", 1), ("", None), ("all", None)])
def test_processors_are_counted(text, count):
    assert cpu_count(text) == count


def test_an_option_that_a_configuration_does_not_name_is_off_and_of_no_configuration_nothing_is_known():
    assert build_options("CONFIG_A=m\nCONFIG_AB=y\n", ["CONFIG_A", "CONFIG_B"]) == {"CONFIG_A": "m", "CONFIG_B": "n"}
    assert build_options("garbage", ["CONFIG_A"]) == {}


def test_only_words_about_the_iommu_are_taken():
    assert iommu_words("quiet intel_iommu=on iommu=pt root=UUID=iommu") == ("intel_iommu=on", "iommu=pt")


@pytest.mark.parametrize(
    ("groups", "mark", "kind"),
    [
        ("0::/", "", ""),
        ("12:cpu:/docker/0123abc", "", "docker"),
        ("0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-1.scope", "", "kubernetes"),
        ("0::/", "systemd-nspawn", "systemd-nspawn"),
    ],
)
def test_a_container_is_told_by_its_groups_or_its_mark(groups, mark, kind):
    assert container_kind(groups, mark) == kind


def test_a_field_is_found_by_its_whole_name():
    text = "CapPrm:\t1\nSeccomp_filters:\t3\nSeccomp:\t2\nNo colon\n"
    assert [field(text, name) for name in ("Seccomp", "CapEff", "No colon")] == ["2", "", ""]


def test_memory_is_counted_in_bytes():
    assert meminfo("MemTotal:       24684084 kB\n", "MemTotal") == 24684084 * 1024
    assert meminfo("MemTotal: much\n", "MemTotal") is None


def test_settings_of_the_driver_have_names_without_case():
    assert registry_words('"RMForceStaticBar1=1;;x=;odd"') == {"rmforcestaticbar1": "1", "x": ""}


@pytest.mark.parametrize(("word", "value"), [("ON", True), ("Y", True), ("0", False), ("AUTO", None), ("", None)])
def test_a_switch_has_many_words(word, value):
    assert flag(word) is value
