"""``where=``: select the jobs of a sweep by an expression over a job's values.

``where='mode != "single" and n_devices >= 2 and model.batch_size * microbatches <= 64'`` is parsed
by Python and evaluated here. Only comparisons, arithmetic, ``and``, ``or``, ``not`` and ``in`` are
allowed: nothing is called, and only a job's values are accessible.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fxpart.errors import SpecError
from runner.config.schema import Config
from runner.job.identity import Choices
from runner.sweep.job_values import look_up, why_unknown

__all__ = ["Condition", "parse_where"]

Value = object
"""A number, text, a boolean, a list of those, or None for a value that the job lacks."""
_Look = Callable[[str], Value]

_MOST_CHARACTERS, _MOST_DEEP = 2000, 50
_ALLOWED = 'comparisons, and, or, not, in, + - * / // %, numbers, "text" and lists'
_CONSTANTS: Mapping[str, Value] = {"true": True, "false": False, "null": None}
"""The spelling of configurations; Python's also works."""
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, eq=False, slots=True)
class Condition:
    """An expression that holds for the jobs to run."""

    text: str
    _tree: ast.expr

    def holds(self, config: Config, choices: Choices) -> bool:
        """Return whether the condition holds for a job.

        A value that the job lacks, such as an option of another mode, equals only ``null``, and all
        its order comparisons are false.

        Raises:
            SpecError: if values cannot be compared, such as text and a number.

        """
        value = _evaluate(self._tree, lambda name: look_up(name, config, choices), self.text)
        return _truth(value, self._tree, self.text)


def parse_where(text: str, names: Collection[str] = ()) -> Condition:
    """Parse the condition `text`.

    `names` are the jobs' values in open sections, such as the arguments of a user's model, used to
    suggest a replacement for an unknown name.

    Raises:
        SpecError: if the text is not such an expression, or a name is unknown.

    """
    if not 0 < len(text.strip()) <= _MOST_CHARACTERS:
        raise SpecError(f"where= has {len(text)} characters; write 1 to {_MOST_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes in text
            # Parentheses let an expression in a file span lines.
            tree = ast.parse(f"({text}\n)", mode="eval").body
        _check(tree, text, _MOST_DEEP, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, SpecError):
            raise
        reason = error.msg if isinstance(error, SyntaxError) else "it cannot be read"
        raise _wrong(
            text, f"{reason}; write {_ALLOWED}, and names such as mode or n_devices"
        ) from (error)
    return Condition(text, tree)


def _wrong(text: str, reason: str) -> SpecError:
    return SpecError(f"where={' '.join(text.split())}: {reason}")


def _check(node: ast.expr, text: str, levels: int, names: Collection[str]) -> None:
    """Raise `SpecError` for syntax that `_evaluate` lacks, unknown names, and deep nesting."""
    if levels < 1:
        raise _wrong(text, f"more than {_MOST_DEEP} nested levels; simplify it")
    if isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node)
        if name not in _CONSTANTS:
            problem = why_unknown(name, names)
            if problem:
                raise _wrong(text, problem)
        return
    kind = type(node)
    if kind not in _EVALUATE or (isinstance(node, ast.Constant) and not _is_plain(node.value)):
        raise _wrong(text, f"{ast.unparse(node)} is not allowed; write {_ALLOWED}")
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.expr):
            _check(inner, text, levels - 1, names)
        elif type(inner) not in _OPERATORS:
            raise _wrong(text, f"in {ast.unparse(node)}, this operator is not allowed; {_ALLOWED}")


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _evaluate(node: ast.expr, look: _Look, text: str) -> Value:
    return _EVALUATE[type(node)](node, look, text)


def _name(node: ast.expr, look: _Look, text: str) -> Value:
    name = ast.unparse(node)
    return _CONSTANTS[name] if name in _CONSTANTS else look(name)


def _constant(node: ast.Constant, look: _Look, text: str) -> Value:
    return node.value


def _list(node: ast.List | ast.Tuple, look: _Look, text: str) -> Value:
    return [_evaluate(item, look, text) for item in node.elts]


def _and_or(node: ast.BoolOp, look: _Look, text: str) -> bool:
    ends_at = isinstance(node.op, ast.Or)
    for operand in node.values:
        if _truth(_evaluate(operand, look, text), operand, text) is ends_at:
            return ends_at
    return not ends_at


def _sign_or_not(node: ast.UnaryOp, look: _Look, text: str) -> Value:
    value = _evaluate(node.operand, look, text)
    if isinstance(node.op, ast.Not):
        return not _truth(value, node.operand, text)
    if value is None:
        return None
    number = _number(value, node.operand, text)
    return -number if isinstance(node.op, ast.USub) else number


def _calculate(node: ast.BinOp, look: _Look, text: str) -> Value:
    sides = [_evaluate(side, look, text) for side in (node.left, node.right)]
    if None in sides:
        return None
    left, right = (
        _number(value, side, text)
        for value, side in zip(sides, (node.left, node.right), strict=True)
    )
    try:
        return _ARITHMETIC[type(node.op)](left, right)
    except (ZeroDivisionError, OverflowError) as error:
        raise _wrong(text, f"{ast.unparse(node)} cannot be computed: {error}") from error


def _compare(node: ast.Compare, look: _Look, text: str) -> bool:
    left, left_node = _evaluate(node.left, look, text), node.left
    for sign, right_node in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(right_node, look, text)
        try:
            holds = _pair(sign, left, right)
        except TypeError as error:
            sides = f"{ast.unparse(left_node)} ({_kind(left)}) and {ast.unparse(right_node)}"
            raise _wrong(text, f"{sides} ({_kind(right)}) cannot be compared") from error
        if not holds:
            return False
        left, left_node = right, right_node
    return True


def _pair(sign: ast.cmpop, left: Value, right: Value) -> bool:
    """Return whether one comparison holds. Raises `TypeError` if the types are incompatible."""
    if isinstance(sign, ast.In | ast.NotIn):
        return right is not None and _is_in(left, right) is isinstance(sign, ast.In)
    if isinstance(sign, ast.Eq | ast.NotEq):
        return _is_equal(left, right) is isinstance(sign, ast.Eq)
    if left is None or right is None:
        return False
    if _kind(left) != _kind(right) or _kind(left) not in ("a number", "text"):
        raise TypeError
    return _ORDER[type(sign)](left, right)  # type: ignore[arg-type]


def _is_equal(left: Value, right: Value) -> bool:
    if left is None or right is None:
        return left is right
    if _kind(left) != _kind(right):
        raise TypeError
    return left == right


def _is_in(left: Value, right: Value) -> bool:
    if isinstance(right, str):
        if left is not None and not isinstance(left, str):
            raise TypeError
        return left is not None and left in right
    if not isinstance(right, list):
        raise TypeError
    return any(_is_equal(left, item) for item in right)


def _kind(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before int: bool is a subclass
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "a mapping"


def _number(value: Value, node: ast.expr, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(text, f"{ast.unparse(node)} is {_kind(value)}, but a number is needed")
    return value


def _truth(value: Value, node: ast.expr, text: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        reason = f"{ast.unparse(node)} is {_kind(value)}, neither true nor false"
        raise _wrong(text, f'{reason}; compare it, such as mode == "single"')
    return value


_EVALUATE: Mapping[type[ast.expr], Callable[..., Value]] = {
    ast.Name: _name,
    ast.Attribute: _name,
    ast.Constant: _constant,
    ast.List: _list,
    ast.Tuple: _list,
    ast.BoolOp: _and_or,
    ast.UnaryOp: _sign_or_not,
    ast.BinOp: _calculate,
    ast.Compare: _compare,
}
_OPERATORS = (
    *_ARITHMETIC,
    *_ORDER,
    *(ast.Eq, ast.NotEq, ast.In, ast.NotIn),
    *(ast.And, ast.Or, ast.Not, ast.USub, ast.UAdd, ast.Load),
)
