"""Verdicts about a machine, its kernel and the limits of a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardkit.diagnosing.facts import Host, HugePages, Limit, Memory
from shardkit.diagnosing.judge_host import judge_host, uring_remedy

GIB = 1 << 30


def line(host, name):
    return next(line for line in judge_host(host) if line.name == name)


def test_a_machine_that_is_set_up_has_no_warning(nvme_box):
    assert {line.status for line in judge_host(nvme_box.host)} == {"ok", "info"}


def test_of_an_unknown_machine_nothing_is_held_against_it():
    assert {line.status for line in judge_host(Host())} <= {"ok", "info"}


@pytest.mark.parametrize(
    ("release", "status", "says"),
    [
        ("5.10.0-28-amd64", "warn", "too old for io_uring"),
        ("5.11.0", "ok", "4096 is taken"),
        ("6.0.19", "ok", "4096 is taken"),
        ("6.1.0", "ok", ""),
        ("6.18.44", "ok", ""),
    ],
)
def test_the_kernels_age_decides_what_it_can(nvme_box, release, status, says):
    found = line(replace(nvme_box.host, kernel=release), "kernel")
    assert found.status == status
    assert found.found == f"Linux {release} x86_64{found.found.partition('x86_64')[2]}"
    assert says in found.found
    assert bool(says) == (":" in found.found)


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        (
            {"uring_switch": 2, "uring_refusal": "EPERM: forbidden", "seccomp": 2},
            "sysctl -w kernel.io_uring_disabled=0",
        ),
        ({"uring_switch": 1, "uring_refusal": "EPERM: forbidden"}, "sysctl -w kernel.io_uring_disabled=0"),
        ({"uring_switch": 0, "uring_refusal": "ENOMEM: no room", "seccomp": 2}, "ulimit -l unlimited"),
        ({"uring_switch": 0, "uring_refusal": "EPERM: forbidden", "seccomp": 2}, "--security-opt seccomp=FILE"),
        ({"uring_switch": 0, "uring_refusal": "ENOSYS: hidden", "seccomp": 0}, "CONFIG_IO_URING=y"),
        ({"uring_switch": None, "uring_refusal": "EPERM: forbidden", "seccomp": 0}, "SELinux"),
    ],
)
def test_a_refused_io_uring_has_the_remedy_of_its_cause(facts, remedy):
    found = line(Host(**facts), "io_uring")
    assert (found.status, found.found) == ("warn", facts["uring_refusal"])
    assert remedy in found.remedy == uring_remedy(Host(**facts))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "can be had, and is left off"),
        ({"polling_refusal": "EPERM: before Linux 5.13"}, "no: EPERM: before Linux 5.13; nothing of shardkit"),
        ({"uring_refusal": "ENOSYS: hidden"}, "no: io_uring cannot be had"),
    ],
)
def test_a_kernel_that_polls_is_a_fact(facts, says):
    found = line(Host(**facts), "io_uring SQPOLL")
    assert (found.status, found.found.startswith(says)) == ("info", True)


@pytest.mark.parametrize(
    ("soft", "capable", "status"),
    [(None, False, "ok"), (GIB, False, "ok"), (GIB - 1, False, "warn"), (0, True, "ok"), (0, False, "warn")],
)
def test_locked_memory_counts_unless_the_process_is_above_it(soft, capable, status):
    assert line(Host(locked=Limit(soft=soft), lock_capability=capable), "locked memory").status == status


@pytest.mark.parametrize(("soft", "status"), [(None, "ok"), (1024, "ok"), (1023, "warn")])
def test_too_few_open_files_are_a_warning(soft, status):
    assert line(Host(files=Limit(soft=soft)), "open files").status == status


@pytest.mark.parametrize(
    ("memory", "status", "says"),
    [
        (Memory(total=64 * GIB, available=32 * GIB), "ok", "32 GiB of 64 GiB available"),
        (Memory(available=32 * GIB, group_headroom=GIB), "warn", "32 GiB available, 1 GiB left by the control group"),
        (Memory(group_headroom=4 * GIB), "ok", "4 GiB left by the control group"),
        (Memory(available=GIB), "warn", "1 GiB available"),
        (Memory(), "info", "not told"),
    ],
)
def test_the_tighter_of_machine_and_group_decides(memory, status, says):
    found = line(Host(memory=memory), "memory")
    assert (found.status, found.found) == (status, says)


@pytest.mark.parametrize(
    ("word", "reserved", "status"),
    [("always", 0, "ok"), ("madvise", 0, "ok"), ("never", 0, "warn"), ("never", 8, "info")],
)
def test_without_any_huge_pages_there_is_a_warning(word, reserved, status):
    pages = HugePages(bytes_each=2 << 20, total=reserved, free=reserved)
    assert line(Host(memory=Memory(transparent=word, huge=(pages,))), "transparent huge pages").status == status


@pytest.mark.parametrize(
    ("governors", "status"),
    [
        ({"performance": 4}, "ok"),
        ({"performance": 3, "powersave": 1}, "warn"),
        ({"schedutil": 4}, "warn"),
        ({}, "info"),
    ],
)
def test_every_processor_should_run_at_full_speed(governors, status):
    assert line(Host(governors=governors), "CPU governor").status == status


@pytest.mark.parametrize(("quota", "status"), [(None, "info"), (3.5, "warn"), (4.0, "info")])
def test_more_processors_than_time_for_them_are_a_warning(quota, status):
    assert line(Host(cpus=8, allowed_cpus=4, quota_cpus=quota), "processors").status == status


def test_little_shared_memory_is_a_warning_about_other_loaders(container):
    found = line(container.host, "/dev/shm")
    assert (found.status, "--shm-size" in found.remedy) == ("warn", True)
