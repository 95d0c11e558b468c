"""Conditions on the columns of an index, as people write them: `width >= 256 and class != 'cat'`.

The text is parsed as a Python expression, never run: only what is listed in `GRAMMAR` has a meaning, everything else is
refused by name. `class` is the label by the name of its class; names become numbers before any row is looked at.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
import tokenize
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from shardkit.errors import ConfigError
from shardkit.escaping import escape, is_unicode
from shardkit.format.class_names import class_numbers
from shardkit.format.expression import facts_not_known, require_condition
from shardkit.format.index import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.format.expression import Expression

__all__ = ["GRAMMAR", "MAX_WHERE_CHARACTERS", "columns_of", "parse_where", "require_columns"]

GRAMMAR = "columns, numbers and 'texts' with ==, !=, <, <=, >, >=, in, not in, is None, and, or, not, ( )"
"""What a condition may consist of, for messages."""
MAX_WHERE_CHARACTERS = 100_000
_MAX_DEPTH = 50
_MAX_NUMBER = 2**63 - 1
_EXAMPLE = "e.g. 'width >= 256 and label != 7'"
_COLUMNS = ", ".join(SCHEMA.names) + ", and class for the name of the label's class"
_CLASS = "_cls_"
"""Stands for `class`, no name in Python, where a text is parsed; as long, so that places are what they were."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_Value: TypeAlias = int | float | str


def parse_where(text: str, argument: str = "--where", number_of: Callable[[str], int] | None = None) -> Expression:
    """Return the Arrow expression that a condition means; null, as of a label that is not there, fulfils no comparison.

    Args:
        text: the condition; a comparison may be chained, `100 < width <= 200`.
        argument: what the caller calls it, for messages.
        number_of: gives a class's number by its name, see `class_numbers`; None where there are no names.

    Raises:
        ConfigError: no such column, no such class, or not this language; lists the columns and what there is.
    """
    if len(text) > MAX_WHERE_CHARACTERS:
        raise ConfigError(f"{argument} is too long", expected=f"at most {MAX_WHERE_CHARACTERS} characters",
                          found=len(text))  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a text is no matter of this program's sources
            tree = _parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise _refused(argument, f"cannot be read ({escape(what)})", text) from error
    parser = _Parser(argument, text, number_of or class_numbers(None))
    return require_condition(argument, parser.condition(tree.body, 0))


def _parsed(text: str) -> ast.Expression:
    """Return the syntax tree of a text in which `class` is a name."""
    text = text.strip()
    if "class" in text:
        lines = [f"{line}\n" for line in re.split("\r\n|\r|\n", text)]
        with contextlib.suppress(tokenize.TokenError, SyntaxError, ValueError):  # the parser says what is wrong
            for token in tokenize.generate_tokens(iter(lines).__next__):
                if token.type == tokenize.NAME and token.string == "class":
                    (row, start), (_, end) = token.start, token.end
                    lines[row - 1] = lines[row - 1][:start] + _CLASS + lines[row - 1][end:]
        text = "".join(lines)
    return ast.parse(text, mode="eval")


def _refused(argument: str, what: str, found: str) -> ConfigError:
    shown = found if len(found) <= 80 else f"{found[:77]}..."
    return ConfigError(
        f"{argument} {what}", expected=f"{GRAMMAR}; the columns are {_COLUMNS}",
        found=escape(shown), remedy=_EXAMPLE,
    )  # fmt: skip


class _Parser:
    """Turns syntax trees into Arrow expressions."""

    def __init__(self, argument: str, text: str, number_of: Callable[[str], int]) -> None:
        from pyarrow import compute

        self._compute = compute
        self._argument, self._text, self._number_of = argument, text.strip(), number_of

    def condition(self, node: ast.expr, depth: int) -> Expression:
        """Return what is true or false for each sample."""
        if depth > _MAX_DEPTH:
            raise _refused(self._argument, f"is nested more than {_MAX_DEPTH} deep", self._text)
        if isinstance(node, ast.BoolOp):
            join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return _balanced(join, [self.condition(value, depth + 1) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.condition(node.operand, depth + 1)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides[:-1], node.ops, sides[1:], strict=True)
            return _balanced(operator.and_, [self._comparison(left, op, right) for left, op, right in pairs])
        raise self._no("is no condition", node)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Expression:
        if not isinstance(op, ast.Is | ast.IsNot) and (_is_class(left) or _is_class(right)):
            if not isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
                raise self._no("has an order of classes, which have none", left)
            left, right = self._by_number(left), self._by_number(right)
        if isinstance(op, ast.In | ast.NotIn):
            return self._membership(left, right, wanted=isinstance(op, ast.In))
        if isinstance(op, ast.Is | ast.IsNot):
            if not isinstance(right, ast.Constant) or right.value is not None:
                raise self._no("has `is` before something else than None", right)
            column = self._field(self._column(left))
            return column.is_null() if isinstance(op, ast.Is) else column.is_valid()
        first, second = self._operand(left), self._operand(right)
        names = [name for name, _ in (first, second) if name is not None]
        if not names:
            raise self._no("compares no column", left)
        if _is_text(*first) != _is_text(*second):
            raise self._mixed(names[0], right)
        return _COMPARISONS[type(op)](self._term(*first), self._term(*second))

    def _membership(self, left: ast.expr, right: ast.expr, *, wanted: bool) -> Expression:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise self._no("has `in` before something else than a list of values, as (1, 2)", right)
        name = self._column(left)
        values = [self._constant(element) for element in right.elts]
        kind = SCHEMA.field(name).type
        if any(isinstance(value, str) != (kind == pa.utf8()) for value in values):
            raise self._mixed(name, right)
        column = self._field(name)
        found = column.isin(pa.array(_possible(values, kind), kind))
        return (found if wanted else ~found) & column.is_valid()

    def _by_number(self, node: ast.expr) -> ast.expr:
        """Return one side of a comparison of classes as a side of one of labels."""
        if _is_class(node):
            found: ast.expr = ast.Name("label")
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            found = ast.Tuple([self._by_number(element) for element in node.elts])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = ast.Constant(self._number_of(node.value))
        else:
            raise self._no("compares class with something else than a 'name'", node)
        return ast.copy_location(found, node)

    def _operand(self, node: ast.expr) -> tuple[str | None, _Value]:
        if isinstance(node, ast.Name):
            return self._column(node), ""
        return None, self._constant(node)

    def _term(self, name: str | None, value: _Value) -> Expression:
        if name is not None:
            return self._field(name)
        return self._compute.scalar(value)

    def _field(self, name: str) -> Expression:
        return self._compute.field(name)

    def _column(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Name):
            raise self._no("wants a column here", node)
        if _is_class(node):
            return "label"
        if node.id not in SCHEMA.names:
            raise ConfigError(f"{self._argument} names a column that is not there", found=escape(node.id[:80]),
                              expected=f"one of {_COLUMNS}", remedy=_EXAMPLE)  # fmt: skip
        return node.id

    def _constant(self, node: ast.expr) -> _Value:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                raise self._no("has a minus before a text", node)
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self._no("wants a column, a number or a text here", node)
        if isinstance(value, str):
            if not is_unicode(value):
                raise self._no("has a text that no index holds", node)
            return value
        if abs(value) > _MAX_NUMBER:
            raise self._no("has a number that no column holds", node)
        return sign * value

    def _mixed(self, name: str, node: ast.expr) -> ConfigError:
        expected, remedy = f"a {'text' if _is_text(name, '') else 'number'} for {name}", _EXAMPLE
        if name == "label":
            expected += ": label is the class's number"
            remedy = "class == 'NAME' asks for its name, which shardkit inspect and the dataset's classes tell"
        found = ast.get_source_segment(self._text, node) or self._text
        return ConfigError(f"{self._argument} compares a text with a number", expected=expected,
                           found=escape(found[:80]), remedy=remedy)  # fmt: skip

    def _no(self, what: str, node: ast.expr) -> ConfigError:
        return _refused(self._argument, what, ast.get_source_segment(self._text, node) or self._text)


def _is_class(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == _CLASS


def _is_text(name: str | None, value: _Value) -> bool:
    return isinstance(value, str) if name is None else SCHEMA.field(name).type == pa.utf8()


def _possible(values: Sequence[_Value], kind: pa.DataType) -> list[_Value]:
    """Return the values that a column of a type can have: Arrow refuses to make the others of that type."""
    if kind == pa.utf8():
        return list(values)
    count = 1 << kind.bit_width
    low = -count // 2 if pa.types.is_signed_integer(kind) else 0
    numbers = [value for value in values if not isinstance(value, str)]
    return [int(value) for value in numbers if value == int(value) and low <= value < low + count]


def _balanced(join: Callable[[Any, Any], Any], parts: list[Any]) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Join conditions as a flat tree: Arrow follows a deep one by recursion."""
    while len(parts) > 1:
        parts = [join(*parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
    return parts[0]


def columns_of(text: str) -> frozenset[str]:
    """Return the columns that a condition asks for; it is one that `parse_where` takes."""
    names = frozenset(node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))
    return names & frozenset(SCHEMA.names)  # `class` is not among them: every index has the label


def require_columns(text: str, known: frozenset[str]) -> None:
    """Refuse a condition that asks for a column which an index does not fill: it would find 0 in every row.

    Raises:
        ConfigError: it does.
    """
    if missing := columns_of(text) - known:
        raise facts_not_known(missing, known)
