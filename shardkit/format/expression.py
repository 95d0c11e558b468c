"""Conditions on the columns of an index, as Arrow expressions, and which rows fulfil them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.format.index import SCHEMA, WHOLE_IMAGE_COLUMNS, check_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from shardkit.format.index import RecordBatch

__all__ = ["Expression", "facts_not_known", "is_in", "iter_masks", "require_condition", "require_known"]

Expression: TypeAlias = Any
"""A `pyarrow.compute.Expression`, e.g. `pyarrow.compute.field("width") >= 256`; Any: pyarrow has no types."""

# pyarrow.compute and pyarrow.acero take as long to import as Arrow itself, and few runs select: they are imported when
# they are asked for.
_EXAMPLE = 'pyarrow.compute.field("width") >= 256'
_NO_TEXT = pa.struct([])  # stands for a text that nobody asks for: no comparison, no function of texts takes it
_NUMBERS = pa.schema([field.with_type(_NO_TEXT) if field.type == pa.utf8() else field for field in SCHEMA])


def is_in(name: str, values: Sequence[int] | Sequence[str]) -> Expression:
    """Return the condition that a column has one of some values.

    Raises:
        UnicodeEncodeError: a text cannot be in an index, since it has no UTF-8.
    """
    from pyarrow import compute

    return compute.field(name).isin(pa.array(values, SCHEMA.field(name).type))


def require_condition(argument: str, value: object) -> Expression:
    """Return `value`, which must be a condition on the columns of an index.

    Args:
        argument: what the caller calls it, for the message.
        value: what was given.

    Raises:
        ConfigError: it is no expression, it names a column that is not there, or its result is not true or false.
    """
    from pyarrow import compute

    if not isinstance(value, compute.Expression):
        raise ConfigError(
            f"{argument} is no condition", expected="a text or a pyarrow.compute.Expression",
            found=type(value).__name__, remedy=f"write {argument}='width >= 256', or {argument}={_EXAMPLE}",
        )  # fmt: skip
    try:
        kind = _result_type(SCHEMA, value)
    except pa.ArrowException as error:
        message = _first_line(error)
        expected = f"one of {', '.join(SCHEMA.names)}" if message.startswith("No match for FieldRef") else None
        raise ConfigError(
            f"{argument} cannot be asked of the index", expected=expected, found=message, remedy=f"e.g. {_EXAMPLE}"
        ) from error
    if kind != pa.bool_():
        raise ConfigError(
            f"{argument} is no condition", expected="true or false for each sample", found=str(kind),
            remedy=f"compare it with something: {_EXAMPLE}",
        )  # fmt: skip
    return value


def require_known(condition: Expression, known: frozenset[str]) -> None:
    """Refuse a condition that asks for a column which an index does not fill: it would find 0 in every row.

    Args:
        condition: as `require_condition` gives it.
        known: the columns that say something.

    Raises:
        ConfigError: it asks for another one.
    """
    missing = {
        name for name in SCHEMA.names if name not in known and not _can_do_without(condition, SCHEMA.names.index(name))
    }
    if missing:
        raise facts_not_known(frozenset(missing), known)


def facts_not_known(missing: frozenset[str], known: frozenset[str]) -> ConfigError:
    """Return the error about a condition on columns that an index does not fill."""
    facts = "full" if missing & WHOLE_IMAGE_COLUMNS else "header"
    return ConfigError(
        "the condition asks for facts of images not looked at", expected=f"only {', '.join(sorted(known))}",
        found=", ".join(sorted(missing)),
        remedy=f"tars: shardkit index --facts {facts}, --overwrite where they have an index; else "
        "convert without the condition, then the result with it",
    )  # fmt: skip


def _can_do_without(condition: Expression, column: int) -> bool:
    try:
        _result_type(SCHEMA.remove(column), condition)
    except pa.ArrowException:
        return False
    return True


def iter_masks(
    batches: Sequence[RecordBatch], conditions: Sequence[Expression]
) -> Iterator[list[npt.NDArray[np.bool_]]]:
    """Yield, for a run of rows after another, which of them fulfil each condition; null counts as false.

    Texts are checked first, all of them, when a condition asks for one; else they are not looked at.

    Args:
        batches: of an index, as `shardkit.format.index.decode_dataset_index` gives them.
        conditions: as `require_condition` gives them; one or more.

    Yields:
        One bool [m] for each condition; the runs have at most 32768 rows.

    Raises:
        ConfigError: a condition cannot be computed for some row, e.g. it divides by 0.
        IndexFormatError: a text is damaged.
    """
    with_texts = not all(_asks_no_text(condition) for condition in conditions)
    rows = [_check(batch, number) if with_texts else _without_texts(batch) for number, batch in enumerate(batches)]
    table = pa.Table.from_batches(rows, SCHEMA if with_texts else _NUMBERS)
    # One plan for all batches: the values of `is_in` are hashed once. Without threads it runs as far as it is asked,
    # in the order of the rows.
    masks = iter(_plan(table, conditions).to_reader(use_threads=False))
    while True:
        try:
            batch = next(masks)
        except StopIteration:
            return
        except pa.ArrowException as error:
            raise ConfigError("a condition cannot be computed for every sample", found=_first_line(error)) from error
        yield [column.fill_null(False).to_numpy(zero_copy_only=False) for column in batch.columns]


def _plan(table: pa.Table, expressions: Sequence[Expression]) -> Any:  # noqa: ANN401 - pyarrow has no types
    from pyarrow import acero

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    names = [str(number) for number in range(len(expressions))]
    project = acero.Declaration("project", acero.ProjectNodeOptions(list(expressions), names))
    return acero.Declaration.from_sequence([source, project])


def _result_type(schema: pa.Schema, expression: Expression) -> pa.DataType:
    # `to_reader` would not do: Arrow 26 crashes on the schema of a plan that could not be made.
    return _plan(schema.empty_table(), [expression]).to_table(use_threads=False).schema.field(0).type


def _asks_no_text(expression: Expression) -> bool:
    try:
        _result_type(_NUMBERS, expression)
    except pa.ArrowException:
        return False
    return True


def _check(batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
    check_rows(batch, number)
    return batch.replace_schema_metadata(None)


def _without_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    nothing = pa.Array.from_buffers(_NO_TEXT, batch.num_rows, [None])
    columns = [nothing if field.type == _NO_TEXT else batch.column(field.name) for field in _NUMBERS]
    return pa.RecordBatch.from_arrays(columns, schema=_NUMBERS)


def _first_line(error: Exception) -> str:
    return escape((str(error).splitlines() or [type(error).__name__])[0][:200])
