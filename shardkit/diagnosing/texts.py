"""What the texts of /proc, /sys and /etc say. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "build_options", "chosen", "container_kind", "driver_of", "field", "iommu_words", "meminfo", "numbers", "quota",
    "registry_words",
]  # fmt: skip

_CHOSEN = re.compile(r"\[([^\]]+)\]")
_CONTAINERS = ("docker", "kubepods", "containerd", "podman", "libpod", "lxc")


def field(text: str, name: str) -> str:
    r"""Return what stands behind "name:" in lines of that form; empty when there is no such line.

    >>> field("Seccomp:\t2\nSeccomp_filters:\t1\n", "Seccomp")
    '2'
    """
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def chosen(text: str) -> str:
    """Return the word in brackets, or the only word.

    >>> chosen("always [madvise] never"), chosen("none"), chosen("none mq-deadline")
    ('madvise', 'none', '')
    """
    found = _CHOSEN.search(text)
    if found:
        return found[1]
    return text if " " not in text else ""


def meminfo(text: str, name: str) -> int | None:
    """Return bytes of /proc/meminfo."""
    words = field(text, name).split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def build_options(text: str, wanted: Iterable[str]) -> dict[str, str]:
    r"""Return options of a kernel's configuration: "y", "m", a value, or "n" for what is not set.

    >>> build_options("CONFIG_A=y\n# CONFIG_B is not set\n", ["CONFIG_A", "CONFIG_B", "CONFIG_C"])
    {'CONFIG_A': 'y', 'CONFIG_B': 'n', 'CONFIG_C': 'n'}
    >>> build_options("", ["CONFIG_A"])
    {}
    """
    found = dict(re.findall(r"^(CONFIG_\w+)=(.*)$", text, re.M)) if text else {}
    return {name: found.get(name, "n") for name in wanted} if found else {}


def numbers(ranges: str) -> frozenset[int]:
    """Return the numbers of a list of ranges; none of what is no such list.

    >>> sorted(numbers("0-2,8")), numbers("")
    ([0, 1, 2, 8], frozenset())
    """
    try:
        pairs = [part.split("-") for part in ranges.split(",") if part]
        return frozenset(number for pair in pairs for number in range(int(pair[0]), int(pair[-1]) + 1))
    except ValueError:
        return frozenset()


def quota(cpu_max: str) -> float | None:
    """Return the processors of a control group's cpu.max; None for no limit.

    >>> quota("400000 100000"), quota("max 100000"), quota("")
    (4.0, None, None)
    """
    words = cpu_max.split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def iommu_words(command_line: str) -> tuple[str, ...]:
    """Return the words of the kernel's command line that are about the IOMMU."""
    return tuple(word for word in command_line.split() if "iommu" in word.partition("=")[0])


def container_kind(groups: str, environment_file: str) -> str:
    """Return the kind of container that the names of a process's control groups, or a container's mark, tell.

    Args:
        groups: the text of /proc/self/cgroup.
        environment_file: the text of /run/systemd/container, which systemd's kin write.
    """
    found = next((kind for kind in _CONTAINERS if kind in groups), "")
    return {"kubepods": "kubernetes", "libpod": "podman"}.get(found, found) or environment_file


def driver_of(version: str) -> tuple[str, bool | None]:
    """Return the version in /proc/driver/nvidia/version, and whether it is the open module.

    >>> driver_of("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build")
    ('580.159', True)
    """
    line = field(version, "NVRM version")
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)*)\b", line)
    return (found[1], "Open Kernel Module" in line) if found else ("", None)


def registry_words(text: str) -> dict[str, str]:
    """Return the settings in NVreg_RegistryDwords, by their names in lower case.

    >>> registry_words("RMForceStaticBar1=1;RmForceDisableIomapWC=1;")
    {'rmforcestaticbar1': '1', 'rmforcedisableiomapwc': '1'}
    """
    pairs = (word.split("=", 1) for word in text.strip('"').split(";") if "=" in word)
    return {name.strip().lower(): value.strip() for name, value in pairs}
