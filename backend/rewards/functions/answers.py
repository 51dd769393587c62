"""Shipped reward functions that compare a completion's answer with the dataset's. No text makes them slow: what they
read of an answer is short, arithmetic is bounded, and math-verify runs in a child process with a time limit."""

import ast
import operator
import re
import warnings
from collections.abc import Callable
from fractions import Fraction

from backend.rewards.functions.math_equality import answer_part, correct, final_answer, marked_answer
from backend.rewards.functions.r1 import extract_answer
from backend.rewards.registry import Scores, Texts, Types, register_reward_function, require

# Evaluate arithmetic exactly, in fractions, by walking Python's syntax tree. Nothing is ever executed.

LONGEST = 500  # characters of an expression, at most
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
    sides = text.split("=")
    if not all(map(_ALPHABET.fullmatch, sides)):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would warn that "3(4)" calls a number
            values = {_evaluate(ast.parse(side.strip(), mode="eval").body) for side in sides}
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return values.pop() if len(values) == 1 else None


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _evaluate(operand)
        case ast.BinOp(left, ast.Pow(), right):
            base, exponent = _evaluate(left), _evaluate(right)
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if exponent.denominator != 1 or bits * abs(exponent) > _BITS:
                raise ValueError("no whole exponent, or too large a power")
            return base**exponent.numerator
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _bounded(Fraction(_OPERATORS[type(sign)](_evaluate(left), _evaluate(right))))
    raise ValueError("no arithmetic")


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _BITS:
        raise ValueError("too large")
    return number


_OPTION = re.compile(r"[\s(\[{*\"'$]*([A-J])(?![^\W_])[\s)\]}*\"'$]*")
_BETWEEN = re.compile(r",?\s*(?:and|or)\b|[,;&/+]", re.IGNORECASE)
_BEHIND = re.compile(r"[)\].:,;–—-]|$")
_SAYS = re.compile(r"\b(?:answers?|options?|choices?)\b(?:\s+(?:is|are))?[\s:*]*", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_READ = 500
_WORD = re.compile(r"\w+")


@register_reward_function("accuracy_reward", label="Math Accuracy")
def accuracy_reward(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, after_thoughts: bool = False
) -> Scores:
    r"""1.0 when the answer equals the dataset's as mathematics, else 0.0. It is what stands last in the last `<answer>`
    or behind the thoughts: in `\boxed{…}`, behind `####`. With `after_thoughts` only what follows the last `</think>`
    counts, as in TRL's reasoning_accuracy_reward. None where the dataset has no answer. A comparison that takes over a
    second scores 0, and after five of those the rest is compared as text."""
    if after_thoughts:
        completions = [text.rpartition("</think>")[2] if "</think>" in text else "" for text in completions]
    return [None if right is None else float(right) for right in correct(completions, answer)]


@register_reward_function("math_eval", label="Math Eval")
def math_eval(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, tolerance: float = 1e-6
) -> Scores:
    """1.0 when the arithmetic in the answer comes to the dataset's number, else 0.0. It may use + - * / // % ^ and
    brackets; all sides of an equation must agree. Exact, in fractions; `tolerance` is relative. None where the
    dataset's answer is no arithmetic."""
    require(tolerance >= 0, f"tolerance must not be below 0, as {tolerance:g} is")
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        expected, actual = value(final_answer(right)), value(final_answer(completion))
        is_close = expected is not None and actual is not None and abs(actual - expected) <= tolerance * abs(expected)
        scores.append(None if expected is None else float(is_close))
    return scores


@register_reward_function("multiple_choice", label="Multiple Choice")
def multiple_choice(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, partial: bool = False
) -> Scores:
    """1.0 when the chosen option, or set of options, is the dataset's, else 0.0. Options are A to J, as in `B`, `(B)`,
    `B) Paris` or `A and C`: of the last `<answer>`, box or `####`; else after the last “answer is”; else on the last
    line. With `partial`, sets score their overlap over their union. None where the dataset's answer names no option."""
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        expected, chosen = _options(final_answer(right)), _choice(completion)
        score = len(expected & chosen) / max(len(expected | chosen), 1) if partial else float(expected == chosen)
        scores.append(score if expected else None)
    return scores


@register_reward_function("choice_correctness", label="Choice Correctness")
def choice_correctness(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """The overlap of the options that are chosen with the dataset's, over all options in either: 0.0 to 1.0. As
    `multiple_choice` with `partial`, under mlx-grpo's name."""
    return multiple_choice(prompts, completions, answer, types, partial=True)


@register_reward_function("jaccard", label="Jaccard")
def jaccard(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """The share of words that the answer and the dataset's have in common, of all words in either: 0.0 to 1.0. Words
    are runs of letters and digits without case, each counted once. None where the dataset's answer has no words."""
    answers = [set(_WORD.findall(answer_part(text).casefold())) for text in completions]
    expected = [set(_WORD.findall(text.casefold())) for text in answer]
    pairs = zip(expected, answers, strict=True)
    return [len(right & words) / len(right | words) if right else None for right, words in pairs]


def _choice(text: str) -> set[str]:
    part = answer_part(text)
    if extract_answer(text) or marked_answer(part):
        return _options(final_answer(text))
    end = part[-_READ:]
    announced = [options for match in _SAYS.finditer(end) if (options := _options(end[match.end() :], announced=True))]
    return announced[-1] if announced else _options(end.rpartition("\n")[2])


def _options(text: str, announced: bool = False) -> set[str]:
    """The options at the beginning of a text; empty where it begins with anything else, as in “A city”. `announced` by
    “the answer is”, a single capital is one whatever follows it."""
    text = _TEXT.sub(r"\1", text[:_READ]).strip()
    if len(text) == 1:
        text = text.upper()  # in the middle of a sentence a small letter would be a word
    options: set[str] = set()
    position = 0
    while option := _OPTION.match(text, position):
        position = option.end()
        between = _BETWEEN.match(text, position)
        in_brackets = option[0].rstrip()[-1:] != option[1]
        if not (announced or in_brackets or between or _BEHIND.match(text, position)):
            return set()
        options.add(option[1])
        if not between:
            break
        position = between.end()
    return options
