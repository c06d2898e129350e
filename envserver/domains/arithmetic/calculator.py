"""A calculator for text that an agent wrote: exact, bounded in time and memory, nothing is ever executed."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 256  # of a numerator or denominator, at any step; about 77 digits

_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculatorError(ValueError):
    """The expression is not arithmetic, or too large; the message is for the agent."""


def calculate(expression: str) -> str:
    """The exact value of an expression of integers, + - * / and parentheses: "5", "-12", or "7/2".

    Raises CalculatorError.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    if not set(expression) <= set("0123456789+-*/() "):
        raise CalculatorError("use integers, + - * / and parentheses only")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except CalculatorError:
        raise
    except (SyntaxError, RecursionError, MemoryError) as error:  # deep nesting fails in the parser in any of these ways
        raise CalculatorError("this is not an arithmetic expression") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(Fraction(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise CalculatorError("division by zero")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise CalculatorError("use integers, + - * / and parentheses only")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("the numbers are too large")
    return value
