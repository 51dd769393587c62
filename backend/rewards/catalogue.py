"""Reward functions read from source text: names, labels, what each scores, parameters; and the entries that name them.

No user's file is run and no engine is loaded: only names that are literals in the source are seen (`computes_names`).
An entry of `reward_functions` has one of four forms:

    r1_accuracy                               a function with its defaults
    keyword(word=therefore, name=concludes)   with arguments, here under a name of its own
    rewards.py::brevity(limit=200)            a plain function of a Python file, called as TRL calls it
    org/name(quantization=4)                  a reward model: an id on Hugging Face, or a folder

It is parsed and never evaluated: arguments are literals, and a bare word is text.
"""

import ast
import difflib
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file, read_bytes, user_path
from backend.utils.text import quote

BUILT_IN = "built in"
DEFAULT_REWARDS = (
    "r1_accuracy_reward_func",
    "r1_int_reward_func",
    "r1_strict_format_reward_func",
    "r1_soft_format_reward_func",
    "r1_count_xml",
)  # default of `reward_functions`
COMPARING_REWARDS = (
    *("r1_accuracy_reward_func", "accuracy_reward", "math_eval", "multiple_choice", "choice_correctness", "jaccard"),
    "cosine_scaled_reward",
)  # shipped functions that need the dataset's answer
INPUTS = (
    *("prompts", "completions", "answer", "types", "completion_ids", "completions_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)  # Parameters filled from the sample. TRL documents `completions_ids` but passes `completion_ids`; both work.
CODE_TESTS = "code_tests"
TEST_COLUMNS = (
    *("tests", "test_list", "test_cases", "verification_info", "input_output", "official_tests", "test", "unit_tests"),
)  # columns with tests for `code_tests`, in order of preference
JUDGE = "judge"
ALIAS = "name"  # argument that renames an entry in metrics and tables

_SETTING = "reward_functions"
_REWARD_FILE = "reward_functions_file"
_REWARD_DECORATOR = "register_reward_function"
_REWARDS_FOLDER = Path(__file__).parent / "functions"
_REWARD_MODULES = ("r1", "answers", "formats", "code", "judge")
_ENDING = re.compile(r"_reward(_func)?$")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")
_FILE = re.compile(r"""([^"'=]*?)::(.*)""", re.DOTALL)
_METRIC = re.compile(r"[A-Za-z0-9_.-]+")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_KINDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "None": "none"}
_LONGEST_NAME = 100  # characters of a misspelt name to compare

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A parsed entry. `file` is the path before `::`, or ""; `function` of a reward model is its folder or id."""

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    alias: str = ""
    file: str = ""

    @property
    def name(self) -> str:
        """The alias, else the function's name, else the last part of a model's path, as in TRL."""
        return self.alias or self.function.rstrip("/").rpartition("/")[2]

    @property
    def is_model(self) -> bool:
        return "/" in self.function and not self.file

    @property
    def text(self) -> str:
        arguments = {**self.arguments, **({ALIAS: self.alias} if self.alias else {})}
        inside = ", ".join(f"{key}={_written(value)}" for key, value in arguments.items())
        return f"{self.file}{'::' if self.file else ''}{self.function}{f'({inside})' if inside else ''}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A settable parameter. `kind` and `default` are source text; default None means required."""

    name: str
    kind: str
    default: str | None


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """A function for tables. `scores`: first sentence of its docstring; `source`: "built in" or a path."""

    name: str
    label: str
    scores: str
    source: str
    line: int
    parameters: tuple[Parameter, ...] = ()


def read_call(text: str) -> RewardCall:
    """Parse one entry. Raises UserError on `reward_functions`."""

    def unreadable(why: str) -> UserError:
        return UserError(_SETTING, f"The reward function {quote(text, 60)} cannot be read: {why}.")

    def value_of(name: str, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return _WORDS.get(node.id.lower(), node.id)
        if isinstance(node, ast.List | ast.Tuple):
            return [value_of(name, item) for item in node.elts]
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError):
            value = ...
        if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
            raise unreadable(f"{quote(name, 30)} is neither a number nor text; text with signs or spaces needs quotes")
        return value

    if not text.strip():
        raise UserError(_SETTING, "An entry of the reward functions is empty; take it out, or write a name.")
    divided = _FILE.fullmatch(text)
    file, rest = (divided[1].strip(), divided[2]) if divided else ("", text)
    function, bracket, inside = (part.strip() for part in rest.strip().partition("("))
    if not function or (divided and not file):
        raise unreadable("it names no function")
    if not bracket:
        return RewardCall(function, file=file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in quotes is meant literally; Python parses it so, with a warning
            parsed = ast.parse(f"f({inside}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parsed = None
    if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
        raise unreadable("what is in its brackets is not a list of arguments; text with signs or spaces needs quotes")
    names = [keyword.arg for keyword in parsed.keywords]
    if parsed.args or None in names:
        raise unreadable("each of its arguments needs a name, as in keyword(word=therefore)")
    if len(set(names)) < len(names):
        raise unreadable("an argument is given twice")
    arguments = {str(keyword.arg): value_of(str(keyword.arg), keyword.value) for keyword in parsed.keywords}
    alias = arguments.pop(ALIAS, None)
    if alias is not None and not (isinstance(alias, str) and _METRIC.fullmatch(alias)):
        raise unreadable(f"its {ALIAS} must be made of letters, digits, dots, dashes and underscores")
    return RewardCall(function, arguments, alias or "", file)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def split_names(entries: str | Iterable[Any]) -> list[str]:
    """Split `reward_functions` at commas outside brackets and quotes, and rejoin entries that YAML split."""
    names: list[str] = []
    if isinstance(entries, str):
        text = entries.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        for piece in map(str.strip, _pieces(text)[0]):
            if "(" not in piece:
                piece = piece.strip("'\"")
            elif piece[0] in "'\"" and piece[-1] == piece[0]:
                piece = piece[1:-1].strip()
            names += [piece] if piece else []
        return names
    open_brackets = 0
    for part in map(str, entries):
        if open_brackets:
            names[-1] += f", {part}"
        else:
            names.append(part)
        open_brackets = _pieces(names[-1])[1]
    return names


def _pieces(text: str) -> tuple[list[str], int]:
    pieces, depth, quote, escaped = [""], 0, "", False
    for char in text:
        if quote:
            quote = quote if escaped or char != quote else ""
            escaped = char == "\\" and not escaped
        elif char in "'\"" and (depth or not pieces[-1].strip()):
            quote = char  # one in the middle of a name is an apostrophe: it's.py::brief
        else:
            depth = max(0, depth + _BRACKETS.get(char, 0))
        if char == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += char
    return pieces, depth


def reward_call(text: str, known: Collection[str]) -> RewardCall:
    """Parse an entry, resolving its name among `known`, then short names. Raises UserError."""
    if text in known:
        return RewardCall(text)
    call = read_call(text)
    if call.file or call.function in known:
        return call
    short = {_ENDING.sub("", entry.name): entry.name for entry in builtin_rewards()}
    return replace(call, function=short.get(call.function, call.function))


def find_call(text: str) -> RewardCall | None:
    """Parse an entry, resolving short names; None if it cannot be parsed, which the check of entries reports."""
    try:
        return reward_call(text, ())
    except UserError:
        return None


def canonical_entry(text: str) -> str:
    """Entry with its registered name and canonical arguments. Unparsable text is unchanged."""
    call = find_call(text)
    return call.text if call else text


@lru_cache(256)
def metric_name(text: str) -> str:
    """Name of an entry's scores in `rewards/<name>/mean` and tables."""
    call = find_call(text)
    return call.name if call else text


def with_absolute_file(text: str, folder: Path) -> str:
    """Entry with absolute paths of what exists in `folder`: the file before `::`, a reward model, a judge's files."""

    def found(written: Any, inside: str = "") -> str:
        with suppress(UserError):
            path = user_path(str(written), _SETTING, folder)
            return os.path.realpath(path) if is_file(path / inside) else ""
        return ""

    call = find_call(text)
    if call and call.file:
        path = found(call.file)
        return replace(call, file=path).text if path else text
    if call and call.function == JUDGE:
        named = {name: call.arguments[name] for name in ("rubric", "model") if name in call.arguments}
        paths = {name: found(each) or found(each, "config.json") or each for name, each in named.items()}
        return replace(call, arguments={**call.arguments, **paths}).text
    if call and (call.is_model or call.function not in {entry.name for entry in builtin_rewards()}):
        path = found(call.function, "config.json")
        return replace(call, function=path).text if path else text
    return text


def scorable(names: Sequence[str], weights: Sequence[float], *, has_answer: bool) -> tuple[list[str], list[float]]:
    """Entries and weights; without an expected answer, without functions that need one. Missing `weights` mean 1."""
    pairs = zip(names, weights or [1.0] * len(names), strict=True)
    calls = [(name, weight, find_call(name)) for name, weight in pairs]
    kept = [each for each in calls if has_answer or not each[2] or each[2].function not in COMPARING_REWARDS]
    return [name for name, *_ in kept], [weight for _, weight, _ in kept]


def tests_column(named: str, columns: Collection[str]) -> str:
    """Column of tests for `code_tests`: the named one, else the first known; "" for none."""
    if named:
        return named if named in columns else ""
    return next((name for name in TEST_COLUMNS if name in columns), "")


def without_tests(entries: Iterable[str], columns: Collection[str]) -> list[str]:
    """Test columns missing from `columns`, by `code_tests` entry."""
    calls = [call for call in map(find_call, entries) if call and call.function == CODE_TESTS and not call.file]
    named = [str(call.arguments.get("column", "")) for call in calls]
    return [name or TEST_COLUMNS[0] for name in named if not tests_column(name, columns)]


@cache
def builtin_rewards() -> tuple[RewardEntry, ...]:
    """Shipped reward functions in source order."""
    sources = (_REWARDS_FOLDER / f"{module}.py" for module in _REWARD_MODULES)
    return tuple(entry for source in sources for entry in _registered(ast.parse(source.read_bytes()), BUILT_IN)[0])


def rewards_in_file(path: Path) -> list[RewardEntry]:
    """Functions that a file registers under literal names, in source order; of a file that registers none, all public
    ones that take completions. Raises UserError on `reward_functions_file`."""
    tree = parse_reward_file(path)
    registered, computes_more = _registered(tree, str(path))
    if registered or computes_more:
        return registered
    plain: dict[str, RewardEntry] = {}
    for function in functions(tree):
        names = {arg.arg for arg in [*function.args.args, *function.args.kwonlyargs]}
        if names & {"completions", "completion_ids", "completions_ids"} and not function.name.startswith("_"):
            plain[function.name] = _entry(function, function.name, "", str(path))
    return list(plain.values())


def computes_names(path: Path) -> bool:
    """True if the file registers functions under computed names, which `rewards_in_file` cannot list."""
    return _registered(parse_reward_file(path), "")[1]


def find_entry(text: str, known: Iterable[RewardEntry]) -> RewardEntry | None:
    """Function of an entry for display, or None."""
    by_name = {entry.name: entry for entry in known}
    try:
        call = reward_call(text, by_name)
        entry = _called_entry(call, by_name, None)
    except UserError:
        return None
    return replace(entry, name=text, label=call.alias or entry.label) if entry else None


def reward_faults(
    texts: Iterable[str], entries: Iterable[RewardEntry], base: Path | None = None
) -> list[ConfigProblem]:
    """Problems of `reward_functions` that show without running code; paths are relative to `base`."""
    known = {entry.name: entry for entry in entries}
    return check_entries(texts, known, lambda call: _called_entry(call, known, base))


def _called_entry(call: RewardCall, known: Mapping[str, RewardEntry], base: Path | None) -> RewardEntry | None:
    """None if unknown, or not bound by `def` in the file before `::`. Raises UserError."""
    if call.is_model:
        quantization = Parameter("quantization", "int | None", "None")
        return RewardEntry(call.name, call.name, "Score of a reward model.", call.function, 0, (quantization,))
    if not call.file:
        return known.get(call.function)
    path = locate_reward_file(call.file, base)
    tree = parse_reward_file(path, _SETTING)
    defined = {function.name: function for function in functions(tree)}
    if call.function in defined:
        return _entry(defined[call.function], call.function, "", str(path))
    for node in ast.walk(tree):
        is_imported = isinstance(node, ast.alias) and (node.name == "*" or (node.asname or node.name) == call.function)
        is_assigned = isinstance(node, ast.Name) and node.id == call.function and isinstance(node.ctx, ast.Store)
        if is_imported or is_assigned or (isinstance(node, ast.ClassDef) and node.name == call.function):
            return None
    raise UserError(_SETTING, not_in_file(call.function, path, defined))


def check_entries(
    texts: Iterable[str], known: Collection[str], find: Callable[[RewardCall], RewardEntry | None]
) -> list[ConfigProblem]:
    """Problems of names, arguments and duplicates; `find` looks up a function, and may raise UserError."""
    sentences: list[str] = []
    names: list[str] = []
    for text in texts:
        try:
            call = reward_call(text, known)
            entry = find(call)
        except UserError as error:
            sentences += [problem.sentence for problem in error.faults]
            continue
        names.append(call.name)
        if entry:
            sentences += _argument_sentences(call, entry)
        elif not call.file:
            own_first = sorted(known, key={entry.name for entry in builtin_rewards()}.__contains__)
            known_ones = f"{_nearest_is(call.function, known)}the known ones are {quote(', '.join(own_first), 60)}"
            sentences.append(f"There is no reward function {quote(call.function, 40)}; {known_ones}.")
    return [ConfigProblem(_SETTING, sentence) for sentence in sentences] + repeated_names(names)


def repeated_names(names: Iterable[str]) -> list[ConfigProblem]:
    """A problem for each name that several entries have."""
    hint = f"give each a name of its own, as in keyword(word=so, {ALIAS}=says_so)"
    sentences = [f"{name} is listed {times} times; {hint}." for name, times in Counter(names).items() if times > 1]
    return [ConfigProblem(_SETTING, sentence) for sentence in sentences]


def _argument_sentences(call: RewardCall, entry: RewardEntry) -> list[str]:
    """Missing ones only of shipped functions: a user function's may be columns."""
    known = {parameter.name: parameter for parameter in entry.parameters}
    sentences: list[str] = []
    for name in [name for name in call.arguments if name not in known]:
        available = f"{_nearest_is(name, known)}its parameters are {', '.join(known)}" if known else "it has none"
        sentences.append(f"{call.function} has no parameter {name}; {available}.")
    for name, parameter in known.items():
        kinds = [kind.strip() for kind in parameter.kind.split("|")]
        if name not in call.arguments:
            if entry.source == BUILT_IN and parameter.default is None:
                sentences.append(f"{call.function} needs {name}, as in {call.function}({name}=…).")
        elif all(kind in _KINDS for kind in kinds):
            value = call.arguments[name]
            given = type(value).__name__ if value is not None else "None"
            if given not in kinds and not (given == "int" and "float" in kinds):
                types = " or ".join(_KINDS[kind] for kind in kinds)
                sentences.append(f"{name} of {call.function} must be {types}, not {value!r}.")
    return sentences


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Closest known name, short names included, or None."""
    names = {candidate.lower(): candidate for candidate in known}
    names |= {_ENDING.sub("", lower): full for lower, full in names.items()}
    close = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), names, n=1)
    return names[close[0]] if close else None


def _nearest_is(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f"the nearest is {quote(close, 40)}, and " if close else ""


def not_in_file(name: str, path: Path, functions: Iterable[str]) -> str:
    known = [function for function in functions if not function.startswith("_")]
    return f"{path.name} has no function {name}; {_nearest_is(name, known)}it has {', '.join(known) or 'none'}."


def locate_reward_file(path: str | Path, base: Path | None = None) -> Path:
    """Path of a reward file: `~` expanded, relative to `base` (default: working directory). Raises UserError."""
    return user_path(str(path), _REWARD_FILE, base or Path.cwd())


def parse_reward_file(path: Path, setting: str = _REWARD_FILE) -> ast.Module:
    """Syntax tree of a user's file, compiled but not run. Raises UserError on `setting`."""
    if path.suffix.lower() not in (".py", ".txt"):
        raise UserError(setting, f"{quote(path.name)} should be a Python file that ends in .py or .txt.")
    source = read_bytes(path, setting)
    try:
        tree = ast.parse(source)
        # The parser lets some errors pass that only compiling finds, such as a `return` outside a function.
        compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f" on line {error.lineno}" if error.lineno else ""
        raise UserError(setting, f"{quote(path.name)} has a syntax error{line}: {quote(error.msg)}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(setting, f"{quote(path.name)} cannot be read as Python: {quote(error)}.") from error
    return tree


def functions(parent: ast.AST) -> Iterator[Function]:
    """Functions defined on load, also under `if` or `try`; no methods."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(node, ast.ClassDef):
            yield from functions(node)


def _registered(tree: ast.Module, source: str) -> tuple[list[RewardEntry], bool]:
    """Functions registered under literal names, and True if others are registered too."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    aliases = (alias for node in imports for alias in node.names if alias.name == _REWARD_DECORATOR)
    names = {_REWARD_DECORATOR, *(alias.asname for alias in aliases)}

    def is_decorator(node: ast.AST) -> bool:
        return getattr(node, "attr", "") == _REWARD_DECORATOR or (isinstance(node, ast.Name) and node.id in names)

    entries: list[RewardEntry] = []
    for function in functions(tree):
        for decorator in function.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if not is_decorator(call.func if call else decorator):
                continue
            given: dict[str | None, Any] = {keyword.arg: keyword.value for keyword in call.keywords} if call else {}
            if call and call.args:
                given["name"] = call.args[0]
            name, label = (getattr(given[key], "value", ...) if key in given else None for key in ("name", "label"))
            if isinstance(name, str | None):  # else it is computed
                entries.append(_entry(function, name or function.name, label if isinstance(label, str) else "", source))
    return entries, sum(map(is_decorator, ast.walk(tree))) > len(entries)


def _entry(function: Function, name: str, label: str, source: str) -> RewardEntry:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    optional = zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)
    parameters = tuple(
        Parameter(
            arg.arg, ast.unparse(arg.annotation) if arg.annotation else "", ast.unparse(default) if default else None
        )
        for arg, default in [*optional, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        if arg.arg not in INPUTS
    )
    paragraph = (ast.get_docstring(function) or "").split("\n\n")[0]
    sentence = _SENTENCE_END.split(" ".join(paragraph.split()))[0]
    label = label or name.replace("_", " ").capitalize()
    return RewardEntry(name, label, sentence, source, function.lineno, parameters)
