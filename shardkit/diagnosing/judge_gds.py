"""Verdicts about GPUDirect Storage, cuFile and KvikIO. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardkit.diagnosing.judge_blocks import on_the_bus
from shardkit.diagnosing.judge_gpu import extra_of
from shardkit.diagnosing.line import Line, size_text
from shardkit.diagnosing.packages import PACKAGES
from shardkit.diagnosing.pci import route
from shardkit.diagnosing.roads import Obstacle, barriers, has_fast_storage, roads
from shardkit.storage.switches import flag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit.diagnosing.facts import Facts

__all__ = ["gds_obstacles", "judge_gds"]

_SIZES = {"task_size", "gds_threshold", "bounce_buffer_size"}
_VARIABLE = re.compile(r"KVIKIO_\w+")


def judge_gds(facts: Facts) -> Iterator[Line]:
    """Yield a line for each thing that is known; without a GPU as facts, for nobody misses anything then."""
    yield _verdict(facts)
    for road in roads(facts):
        found = ", ".join(obstacle.why for obstacle in road.obstacles)
        yield Line(f"GDS by {road.name}", "info", f"no: {found}" if found else "nothing in the way")
    yield from _way(facts)
    yield from _cufile(facts)
    yield from _kvikio(facts)


def gds_obstacles(facts: Facts) -> tuple[Obstacle, ...]:
    """Return what keeps a read of the path from going past the CPU; nothing when it goes."""
    road = min(roads(facts), key=lambda road: len(road.obstacles))
    found = [*barriers(facts), *road.obstacles]
    mode, cuda = _mode(facts), facts.gpu.cuda
    if not found and cuda is not None and cuda.gds_error:
        found.append(Obstacle(f"cuFile could not be asked: {cuda.gds_error}", "see cufile.log (CUFILE_LOGFILE_PATH)"))
    if not found and mode and mode != "GDS":
        found.append(Obstacle(f"cuFile takes {mode}", "/usr/local/cuda/gds/tools/gdscheck -p says why"))
    return tuple(found)


def _mode(facts: Facts) -> str:
    return facts.gpu.cuda.gds_mode if facts.gpu.cuda is not None else ""


def _verdict(facts: Facts) -> Line:
    name, obstacles = "GPUDirect Storage", gds_obstacles(facts)
    mode = _mode(facts)
    reads = f"; what reads instead: {mode}" if mode and mode != "GDS" else ""
    if not obstacles:
        return Line(name, "ok", "reads go past the CPU" if mode == "GDS" else "nothing in the way; not asked of cuFile")
    found = f"no: {', '.join(obstacle.why for obstacle in obstacles)}{reads}"
    if not facts.gpu.present or not has_fast_storage(facts):
        return Line(name, "info", found)
    return Line(name, "warn", found, "; ".join(dict.fromkeys(obstacle.remedy for obstacle in obstacles)))


def _way(facts: Facts) -> Iterator[Line]:
    """Judge the way over the PCI bus, which counts only where reads go from device to device."""
    disks = on_the_bus(facts.storage.blocks)
    cards = {number: card for number, card in enumerate(facts.gpu.gpus) if card.chain}
    if not disks or not cards or facts.host.guest is True or gds_obstacles(facts):
        return
    far = [
        str(number) for number, card in cards.items()
        if all(route(disk.chain, card.chain).kind == "apart" for disk in disks)
    ]  # fmt: skip
    if not far:
        yield Line("GDS path", "ok", "disk and GPU share a root complex")
        return
    yield Line(
        "GDS path", "warn", f"GPU {', '.join(far)}: on another root complex than every disk of the path, so that reads "
        "cross the processor",
        "keep this GPU's shards on a disk below its own root complex; else io='direct' for its process",
    )  # fmt: skip


def _cufile(facts: Facts) -> Iterator[Line]:
    cufile, versions = facts.gpu.cufile, facts.software.versions
    copies = [f"{name} {versions[name]}" for name in PACKAGES["cuFile"] if name in versions]
    copies += [cufile.library] if cufile.library else []
    yield Line("libcufile", "info", ", ".join(copies) or "not here")
    if cufile.config_error:
        yield Line("cuFile configuration", "fail", f"{cufile.config}: {cufile.config_error}",
                   f"mend {cufile.config}, or unset CUFILE_ENV_PATH_JSON")  # fmt: skip
    else:
        allowed = {None: "yes, the default", True: "yes", False: "no"}[cufile.allow_compat]
        p2pdma = "on" if cufile.p2pdma else "off"
        yield Line("cuFile configuration", "info", f"{cufile.config or 'none, so the defaults'}; compatibility mode "
                   f"allowed: {allowed}; P2PDMA {p2pdma}")  # fmt: skip
    if cufile.allow_compat is False and facts.gpu.present and gds_obstacles(facts):
        yield Line(
            "cuFile compatibility mode", "warn", "forbidden, and GPUDirect Storage cannot be had: cuFile reads nothing",
            "allow_compat_mode: true in cufile.json (CUFILE_ALLOW_COMPAT_MODE=true)",
        )  # fmt: skip
    given = {name: value for name, value in cufile.environment.items() if name.startswith("CUFILE_")}
    if given:
        yield Line("cuFile environment", "info", " ".join(f"{name}={value}" for name, value in given.items()))


def _kvikio(facts: Facts) -> Iterator[Line]:
    given = {name: value for name, value in facts.gpu.cufile.environment.items() if name.startswith("KVIKIO_")}
    yield _settings(facts, given)
    if not facts.gpu.present:
        return
    compat = flag(given.get("KVIKIO_COMPAT_MODE"))
    if compat is True:
        yield Line("KVIKIO_COMPAT_MODE", "warn", "ON: never by cuFile", "unset KVIKIO_COMPAT_MODE")
    if compat is False and gds_obstacles(facts):
        yield Line(
            "KVIKIO_COMPAT_MODE", "warn", "OFF, and GPUDirect Storage cannot be had: reads fail, or never return",
            "KVIKIO_COMPAT_MODE=AUTO",
        )  # fmt: skip


def _settings(facts: Facts, given: Mapping[str, str]) -> Line:
    answer = facts.gpu.kvikio
    words = " ".join(f"{name}={value}" for name, value in given.items())
    told = f"; the environment says {words}" if words else ""
    if answer is None:
        why = "not asked for its settings" if facts.software.has("KvikIO") else "not installed"
        return Line("KvikIO", "info", why + told)
    if not answer.error:
        found = ", ".join(f"{name} {_setting(name, value)}" for name, value in answer.settings.items())
        return Line("KvikIO", "info", found + told)
    if not facts.gpu.present:
        return Line("KvikIO", "info", answer.error + told)
    wrong = _VARIABLE.search(answer.error)
    remedy = f"unset {wrong[0]}" if wrong else f"pip install 'shardkit[{extra_of(facts)}]'"
    return Line("KvikIO", "warn", answer.error + told, remedy)


def _setting(name: str, value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return size_text(value) if name in _SIZES and isinstance(value, int) else str(value)
