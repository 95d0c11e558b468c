"""What the texts of /proc, /sys and /etc say."""

from __future__ import annotations

import pytest

from shardkit.diagnosing.texts import (
    build_options,
    container_kind,
    driver_of,
    field,
    iommu_words,
    meminfo,
    numbers,
    quota,
    registry_words,
)


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


@pytest.mark.parametrize(
    ("text", "found"), [("0-1,4-7", {0, 1, 4, 5, 6, 7}), ("0", {0}), ("", set()), ("all", set()), ("3-", set())]
)
def test_ranges_are_numbers(text, found):
    assert numbers(text) == found


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
