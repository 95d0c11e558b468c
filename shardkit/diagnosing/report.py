"""A report: facts judged, and demands held against them. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardkit.diagnosing.judge_gds import gds_obstacles, judge_gds
from shardkit.diagnosing.judge_gpu import judge_gpu
from shardkit.diagnosing.judge_host import judge_host, uring_remedy
from shardkit.diagnosing.judge_places import judge_places
from shardkit.diagnosing.judge_software import judge_software
from shardkit.diagnosing.judge_storage import judge_storage
from shardkit.diagnosing.line import Line
from shardkit.storage.uring_causes import UNFIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.diagnosing.facts import Facts

__all__ = ["DEMANDS", "Demand", "Report", "examine"]

Demand: TypeAlias = Literal["gpu", "gds", "direct", "uring"]
"""What may be required: a GPU that CUDA can use; for the path GPUDirect Storage, direct reads, io_uring."""

DEMANDS: tuple[Demand, ...] = ("gpu", "gds", "direct", "uring")
EXIT_INCAPABLE = 7
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Report:
    """All lines by section, and a line for each demand."""

    sections: Mapping[str, tuple[Line, ...]]
    """"host", "storage", "gpu" and "software"."""
    demands: tuple[Line, ...]
    """One for each demand, named as it is: "ok", or "fail" with why and the remedy."""
    facts: Facts

    @property
    def counts(self) -> Mapping[str, int]:
        """Lines by status, demands aside."""
        return Counter(line.status for lines in self.sections.values() for line in lines)

    @property
    def exit_code(self) -> int:
        """0, or 7 when a demand is not met."""
        return EXIT_INCAPABLE if any(line.status == "fail" for line in self.demands) else 0

    def to_json(self) -> dict[str, Any]:
        """Return the document that docs/doctor.md describes."""
        return {
            "schema": SCHEMA,
            "path": self.facts.storage.path,
            "sections": {name: [asdict(line) for line in lines] for name, lines in self.sections.items()},
            "counts": {status: self.counts[status] for status in ("ok", "warn", "fail", "info")},
            "required": [
                {"name": line.name, "met": line.status == "ok", "found": line.found, "remedy": line.remedy}
                for line in self.demands
            ],
            "exit_code": self.exit_code,
            "facts": asdict(self.facts),
        }


def examine(facts: Facts, require: Sequence[Demand] = ()) -> Report:
    """Judge facts.

    Args:
        facts: of any machine.
        require: what this machine must be able to do.
    """
    sections = {
        "host": tuple(judge_host(facts.host)),
        "storage": tuple(judge_storage(facts.storage)),
        "gpu": (*judge_gpu(facts), *judge_places(facts), *judge_gds(facts)),
        "software": tuple(judge_software(facts)),
    }
    return Report(sections, tuple(_held(facts, demand) for demand in dict.fromkeys(require)), facts)


def _held(facts: Facts, demand: Demand) -> Line:
    lacks = {"gpu": _lacks_gpu, "gds": _lacks_gds, "direct": _lacks_direct, "uring": _lacks_uring}[demand](facts)
    return Line(demand, "ok", "can be had") if lacks is None else Line(demand, "fail", *lacks)


def _lacks_gpu(facts: Facts) -> tuple[str, str] | None:
    gpu = facts.gpu
    if not gpu.present:
        remedy = "take a machine that has one, or let the container have it: docker run --gpus all"
        return "there is no NVIDIA GPU", remedy
    if gpu.cuda is None or gpu.cuda.error:
        remedies = (line.remedy for line in judge_gpu(facts) if line.status == "fail" and line.remedy)
        return gpu.cuda.error if gpu.cuda else "CUDA was not asked", "; ".join(remedies) or "nvidia-smi"
    return None if gpu.cuda.devices else ("CUDA sees no GPU", "unset CUDA_VISIBLE_DEVICES")


def _lacks_gds(facts: Facts) -> tuple[str, str] | None:
    lacks = _lacks_gpu(facts)
    if lacks is not None:
        return lacks
    obstacles = gds_obstacles(facts)
    if obstacles:
        remedies = dict.fromkeys(obstacle.remedy for obstacle in obstacles)
        return ", ".join(obstacle.why for obstacle in obstacles), "; ".join(remedies)
    return None


def _lacks_direct(facts: Facts) -> tuple[str, str] | None:
    probed = facts.storage.probed
    if probed is None:
        return facts.storage.refusal, "name a file or folder that may be read"
    if probed.direct_refusal is None and probed.direct_align != 0:
        return None
    why = probed.direct_refusal or "statx says that there are none"
    return f"{probed.mount.file_system} has no direct reads: {why}", "keep shards on XFS or ext4"


def _lacks_uring(facts: Facts) -> tuple[str, str] | None:
    if facts.host.uring_refusal is not None:
        return facts.host.uring_refusal, uring_remedy(facts.host)
    probed = facts.storage.probed
    if probed is not None and probed.mount.file_system.startswith(UNFIT):
        return f"io_uring reads {probed.mount.file_system} wrongly", "a native mount; else io='direct' or 'buffered'"
    return _lacks_direct(facts)
