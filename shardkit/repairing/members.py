"""What stands around a sample's payload: the json member as `verify` demands it, the head as `pack` writes it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardkit.escaping import escape
from shardkit.format.keys import source_from_text
from shardkit.format.strict_json import parse_json_object
from shardkit.format.tar import encode_header, encode_padding, tail_bytes
from shardkit.packing.plan import cls_payload
from shardkit.repairing.structure import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.layout import SampleLayout

__all__ = ["MAX_DERIVED_CLASSES", "ClassNames", "check_json", "sample_head"]

MAX_DERIVED_CLASSES = 1_000_000
"""Without a manifest the json members name the classes; a list with more names than this is not made."""


class ClassNames:
    """The class list: the manifest's, or what most json members say where there is no manifest."""

    def __init__(self, known: Sequence[str] | None, *, derived: bool) -> None:
        """Take the manifest's list, None for no names; or learn names when `derived`, by `count`, then `settle`."""
        self._names = dict(enumerate(known or ()))
        self._known = None if known is None or derived else len(known)
        self._derived = derived
        self._counts: dict[int, Counter[str | None]] = {}
        self._named = bool(known)
        self._largest = -1

    def count(self, label: int, stated: object) -> None:
        """Take what one json member says, damaged or not."""
        if label < MAX_DERIVED_CLASSES and (stated is None or isinstance(stated, str)):
            self._counts.setdefault(label, Counter())[stated] += 1

    def settle(self) -> None:
        """Believe the majority: damage is rare."""
        without = sum(counts[None] for counts in self._counts.values())
        self._named = without * 2 < sum(counts.total() for counts in self._counts.values())
        for label, counts in self._counts.items() if self._named else ():
            del counts[None]
            if counts:
                self._names[label] = str(counts.most_common(1)[0][0])
        self._counts.clear()

    def fault(self, label: int | None, document: dict[str, object]) -> str | None:
        """Return what is wrong with the class that a json member states; None when it is right, or states none.

        A label that nothing has named before gets its name here: from a sample that only its row could find. So the
        order of the calls counts wherever `learns` says so.
        """
        expected = None if label is None else self._names.get(label)
        stated = document.get("class")
        if self.learns(label) and isinstance(stated, str) and label is not None:
            if stated in self._names.values():
                return f"class {_shown(stated)}, which is another label's"
            self._names[label] = expected = stated
        if expected is None or not isinstance(stated, str) or stated == expected:
            return None
        return f"class {_shown(stated)}, expected {_shown(expected)}"

    def learns(self, label: int | None) -> bool:
        """Tell whether the next json member that states a class names this label."""
        if not self._derived or not self._named or label is None:
            return False
        return label < MAX_DERIVED_CLASSES and label not in self._names

    def label_fault(self, label: int | None) -> str | None:
        """Return why a label is none of this dataset's; None when it is one."""
        limit = self._known
        if self._derived and self._names:
            limit = MAX_DERIVED_CLASSES
        return None if label is None or limit is None or label < limit else f"label {label} of {limit} classes"

    def take(self, label: int | None) -> None:
        """Count the label of samples that are kept."""
        self._largest = max(self._largest, -1 if label is None else label)

    @property
    def nameless(self) -> bool:
        """Whether samples are labelled, and nothing that is left names one of their classes."""
        return self._derived and not self._names and self._largest >= 0

    def result(self) -> list[str] | None:
        """Return the class list; labels that no json member names are called `class-N`."""
        if not self._derived:
            return None if self._known is None else list(self._names.values())
        if not self._names:
            return None
        taken = set(self._names.values())
        return [self._names.get(label) or _free(f"class-{label}", taken) for label in range(self._largest + 1)]


def check_json(data: bytes, label: int | None, source: str | None, classes: ClassNames) -> str | None:
    """Return the source that a json member states, None when it states none: those that `convert` took over need not.

    Args:
        data: its payload.
        label: of the sample.
        source: what the old index says; None where there is none.
        classes: of the dataset.

    Raises:
        Fault: it is not one that a dataset has.
    """
    try:
        document = parse_json_object(data.decode("utf-8"))
    except ValueError as error:
        raise Fault("json", f"not a JSON object: {escape(str(error))[:100]}") from error
    wrong = classes.fault(label, document)
    if wrong is not None:
        raise Fault("json", wrong)
    stated = document.get("source")
    if not isinstance(stated, str):
        return None
    try:
        found = source_from_text(stated)
    except UnicodeEncodeError as error:
        raise Fault("json", f"source {_shown(stated)} is no text") from error
    if source not in (None, stated, found):
        raise Fault("json", f"source {_shown(stated)}, expected {_shown(source)}")
    return found


def sample_head(key: str, label: int | None, json: bytes | None, size: int, place: SampleLayout) -> bytes:
    """Return everything of a sample up to its image's payload, byte for byte as `pack` writes it."""
    members = [] if label is None else [("cls", cls_payload(label))]
    if json is not None:
        members.append(("json", json))
    parts = [encode_header(f"{key}.{e}", len(data)) + data + bytes(tail_bytes(len(data))) for e, data in members]
    return b"".join([*parts, encode_padding(place.padding), encode_header(f"{key}.jpg", size)])


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "-"
    taken.add(name)
    return name


def _shown(value: object) -> str:
    return ascii(value)[:100]
