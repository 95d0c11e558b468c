"""Verdicts about GPUDirect Storage, cuFile and KvikIO. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.line import Line
from shardkit.diagnosing.roads import Obstacle, barriers, has_fast_storage, roads
from shardkit.diagnosing.texts import flag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.facts import Facts

__all__ = ["gds_obstacles", "judge_gds"]

_DEFAULTS = {
    "KVIKIO_COMPAT_MODE": "AUTO",
    "KVIKIO_NTHREADS": "1",
    "KVIKIO_TASK_SIZE": "4 MiB",
    "KVIKIO_GDS_THRESHOLD": "16 KiB",
    "KVIKIO_BOUNCE_BUFFER_SIZE": "16 MiB",
    "KVIKIO_AUTO_DIRECT_IO_READ": "OFF",
}


def judge_gds(facts: Facts) -> Iterator[Line]:
    """Yield a line for each thing that is known; nothing where there is no GPU."""
    if not facts.gpu.gpus and not facts.gpu.nodes:
        return
    yield _verdict(facts)
    for road in roads(facts):
        found = ", ".join(obstacle.why for obstacle in road.obstacles)
        yield Line(f"GDS by {road.name}", "info", f"no: {found}" if found else "nothing in the way")
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
    if not has_fast_storage(facts):
        return Line(name, "info", found)
    return Line(name, "warn", found, "; ".join(dict.fromkeys(obstacle.remedy for obstacle in obstacles)))


def _cufile(facts: Facts) -> Iterator[Line]:
    cufile = facts.gpu.cufile
    if cufile.config_error:
        yield Line("cuFile configuration", "fail", f"{cufile.config}: {cufile.config_error}",
                   f"mend {cufile.config}, or unset CUFILE_ENV_PATH_JSON")  # fmt: skip
    else:
        allowed = {None: "yes, the default", True: "yes", False: "no"}[cufile.allow_compat]
        p2pdma = "on" if cufile.p2pdma else "off"
        yield Line("cuFile configuration", "info", f"{cufile.config or 'none, so the defaults'}; compatibility mode "
                   f"allowed: {allowed}; P2PDMA {p2pdma}")  # fmt: skip
    if cufile.allow_compat is False and gds_obstacles(facts):
        yield Line(
            "cuFile compatibility mode", "warn", "forbidden, and GPUDirect Storage cannot be had: cuFile reads nothing",
            "allow_compat_mode: true in cufile.json (CUFILE_ALLOW_COMPAT_MODE=true)",
        )  # fmt: skip
    given = {name: value for name, value in cufile.environment.items() if name.startswith("CUFILE_")}
    if given:
        yield Line("cuFile environment", "info", " ".join(f"{name}={value}" for name, value in given.items()))


def _kvikio(facts: Facts) -> Iterator[Line]:
    given = {name: value for name, value in facts.gpu.cufile.environment.items() if name.startswith("KVIKIO_")}
    settings = {**_DEFAULTS, **given}
    found = " ".join(f"{name.removeprefix('KVIKIO_')}={value}" for name, value in settings.items())
    yield Line("KvikIO", "info", f"{found}{' (defaults)' if not given else ''}")
    compat = flag(given.get("KVIKIO_COMPAT_MODE"))
    if compat is True:
        yield Line("KVIKIO_COMPAT_MODE", "warn", "ON: never by cuFile", "unset KVIKIO_COMPAT_MODE")
    if compat is False and gds_obstacles(facts):
        yield Line(
            "KVIKIO_COMPAT_MODE", "warn", "OFF, and GPUDirect Storage cannot be had: reads fail, or never return",
            "KVIKIO_COMPAT_MODE=AUTO",
        )  # fmt: skip
