"""Evaluate arithmetic exactly, in fractions, by walking Python's syntax tree. Nothing is ever executed.

It knows numbers, brackets and + - * / // % ** (also written × ÷ ^), and sides joined by =, which must be equal. Text
and numbers are limited in size, so that `9**9**9` costs nothing.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable
from fractions import Fraction

LONGEST = 500
"""Characters of an expression, at most."""
_BITS = 4096
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "[": "(", "]": ")"})
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=[0-9])")
_ALPHABET = re.compile(r"[0-9.eE+*/%()\s-]+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def value(text: str) -> Fraction | None:
    """The value; None for what is no arithmetic, too long, too large, divides by zero, or has unequal sides."""
    if len(text) > LONGEST:
        return None
    text = text.strip().strip("$").rstrip(".").translate(_SIGNS)
    text = _LEADING_ZEROS.sub("", _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text))
    sides = [_side(side) for side in text.split("=")]
    return sides[0] if all(side == sides[0] for side in sides) else None


def _side(text: str) -> Fraction | None:
    if not _ALPHABET.fullmatch(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would warn that "3(4)" calls a number
            return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    """Raises ValueError for anything but arithmetic within bounds."""
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _evaluate(operand)
        case ast.BinOp(left, ast.Pow(), right):
            return _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _bounded(Fraction(_OPERATORS[type(sign)](_evaluate(left), _evaluate(right))))
    raise ValueError("no arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > _BITS:
        raise ValueError("no whole exponent, or too large a power")
    return base**exponent.numerator


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _BITS:
        raise ValueError("too large")
    return number
