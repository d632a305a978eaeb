"""The environment `calculator`: a tool that computes arithmetic."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fsdp_trainer.rl.environments.environment import ToolEnvironment, tool

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
LONGEST = 200
"""Characters of an expression at most."""
LARGEST = 10**30
"""Largest number that a power may have: a larger one would take long."""


@dataclass
class Calculator(ToolEnvironment):
    """A tool that computes arithmetic; the rollout is over when the model calls it no more."""

    name: ClassVar[str] = "calculator"
    tools: ClassVar[tuple[dict[str, Any], ...]] = (
        tool(
            "calculator",
            "Computes an expression of numbers with + - * / // % ** and parentheses.",
            expression="for example (3 + 4) * 12",
        ),
    )

    def call(self, /, expression: Any = None, **others: Any) -> str:
        if others or expression is None:
            return "error: calculator takes one argument, expression"
        try:
            return as_text(value_of(str(expression)))
        except (ValueError, ZeroDivisionError, OverflowError, SyntaxError, RecursionError) as error:
            return f"error: {error}"


def value_of(expression: str) -> Any:
    """Return the value of an arithmetic expression. Raises ValueError, and others of Python's."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    return _value(ast.parse(expression.replace("^", "**").strip(), mode="eval").body)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        first, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(first, right)
        return OPERATORS[type(node.op)](first, right)
    raise ValueError("only numbers, + - * / // % ** and parentheses are known")


def _check_power(base: Any, exponent: Any) -> None:
    is_large = abs(base) > 1 and abs(base) ** min(abs(exponent), 200) > LARGEST
    if abs(exponent) > 1000 or is_large:
        raise ValueError("the power is too large")
    if base < 0 and exponent != int(exponent):
        raise ValueError("the power is no real number")


def as_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
