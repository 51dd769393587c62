"""A calculator as a tool, for GRPO Studio and for TRL."""

import ast
import operator

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, such as "(12 + 7.5) * 3".

    Returns:
        The value of the expression.
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"not an expression: {expression[:80]}") from None
    return format(value, ".12g") if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    """The value of a node. Nothing is evaluated but numbers and operators: the model writes what it likes."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        # 9**9**9 would fill the memory, and no time limit can interrupt it.
        if isinstance(node.op, ast.Pow) and abs(right) * len(str(abs(left))) > 100:
            raise ValueError("the power is too large")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("only numbers, parentheses and + - * / // % ** are allowed")
