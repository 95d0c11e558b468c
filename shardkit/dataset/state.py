"""Where a loader stands, as JSON: a few hundred bytes, whatever the dataset's size, from which it goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from shardkit.dataset.mixing import BLOCK, MixedOrder
from shardkit.dataset.order import ORDER_VERSION
from shardkit.dataset.selection import digest
from shardkit.dataset.window import WindowOrder
from shardkit.errors import ConfigError
from shardkit.format.checksum import DIGESTS, hex_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.dataset.order import Order
    from shardkit.dataset.samples import Samples
    from shardkit.dataset.steps import BatchPlan

__all__ = ["MAX_EPOCH", "Position", "dump_state", "load_state", "run_identity"]

_VERSION = 1
MAX_EPOCH = (1 << 48) - 1
"""The last epoch that a loader takes."""
_LISTED = 16
"""Datasets of a mix that are told one by one in a state."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a loader is."""

    epoch: int
    step: int
    """Steps of the epoch whose batches were handed out."""


def run_identity(
    samples: Samples, order: Order, plan: BatchPlan, *, seed: int, shuffle: str
) -> dict[str, Any]:  # Any: JSON values
    """Return everything that decides which samples come at which step, whatever the number of ranks.

    Two loaders with the same identity hand out the same global batches; the step is a position in that row.
    """
    shares = order.shares if isinstance(order, MixedOrder) else (BLOCK,) * len(samples.parts)  # what weights come to
    datasets = [
        f"{part.dataset.generation} {len(part)} {digest(part.rows)} {share}/{BLOCK}"
        for part, share in zip(samples.parts, shares, strict=True)
    ]
    if len(datasets) > _LISTED:
        datasets = [f"{len(datasets)} datasets {hex_digest(DIGESTS[0], ' '.join(datasets).encode())}"]
    identity: dict[str, Any] = {
        "order_version": ORDER_VERSION, "shuffle": shuffle, "seed": seed, "datasets": datasets,
        "global_batch": plan.global_batch, "last_batch": plan.last_batch, "lanes": plan.lanes,
    }  # fmt: skip
    if isinstance(order, WindowOrder):
        identity |= {"extent_samples": order.extent_samples, "window_extents": order.window_extents}
    return identity


def dump_state(identity: Mapping[str, Any], position: Position) -> dict[str, Any]:  # Any: JSON values
    """Return a state: plain dicts, lists, strings and numbers, under 2 kB as JSON."""
    return {"version": _VERSION, "epoch": position.epoch, "step": position.step, "run": dict(identity)}


def load_state(state: object, identity: Mapping[str, Any], steps: int) -> Position:
    """Return the position in a state of the same run.

    Args:
        state: from `dump_state`, perhaps through JSON.
        identity: of the loader that is to go on.
        steps: of its epochs.

    Raises:
        ConfigError: it is no state, of a newer version, or of another run; both sides are shown.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("run"), Mapping):
        remedy = "give the dict, not its JSON: json.loads(...)" if isinstance(state, str | bytes) else None
        raise ConfigError(
            "this is no state of a loader", expected="what state_dict() returned", found=_shown(state)[:100],
            remedy=remedy,
        )  # fmt: skip
    if state.get("version") != _VERSION:
        raise ConfigError(
            "a loader's state has a version that is not known here",
            expected=_VERSION,
            found=_shown(state.get("version")),
        )
    theirs = state["run"]
    names = [*identity, *(name for name in theirs if name not in identity)]
    differing = [name for name in names if theirs.get(name) != identity.get(name)]
    if differing:
        raise ConfigError(
            "a loader's state is of another run",
            expected="; ".join(f"{name} {_shown(identity.get(name))}" for name in differing) + " (this loader)",
            found="; ".join(f"{name} {_shown(theirs.get(name))}" for name in differing) + " (the state)",
            remedy=_remedy(differing, theirs),
        )
    epoch, step = state.get("epoch"), state.get("step")
    if not _is_count(epoch) or epoch > MAX_EPOCH or not _is_count(step) or step > steps:
        raise ConfigError(
            "a loader's state holds no position", expected=f"an epoch from 0 on and a step 0..{steps}",
            found=f"epoch {_shown(epoch)}, step {_shown(step)}",
        )  # fmt: skip
    return Position(epoch, step)


def _remedy(differing: Sequence[str], theirs: Mapping[str, Any]) -> str:  # Any: JSON values
    if list(differing) == ["lanes"]:
        return f"make the loader with lanes={theirs.get('lanes')}, the constant of that run"
    if "datasets" in differing:
        return "open the dataset and the selection that the state was made with, or start without a state"
    if "global_batch" in differing:
        return "keep batch_size * world_size; other numbers of ranks take another batch_size"
    return "make the loader with the state's arguments, or start without a state"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: object) -> str:
    try:
        return json.dumps(value)[:300]
    except (TypeError, ValueError):
        return repr(value)[:300]
