"""The profile for macOS, as text: seatbelt itself is only on a Mac (docs/mac-checklist.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.rewards.confinement import seatbelt


def rules(text: str) -> list[list[object]]:
    """The profile parsed as the S-expressions that it is; strings keep their opening quote."""
    stack: list[list[object]] = [[]]
    at = 0
    while at < len(text):
        if text[at] == "(":
            stack.append([])
        elif text[at] == ")":
            stack[-2].append(stack.pop())
        elif text[at] == '"':
            end, value = at + 1, '"'
            while text[end] != '"':
                end += text[end] == "\\"
                value += text[end]
                end += 1
            stack[-1].append(value)
            at = end
        elif not text[at].isspace():
            end = at
            while not text[end].isspace() and text[end] not in "()":
                end += 1
            stack[-1].append(text[at:end])
            at = end - 1
        at += 1
    assert len(stack) == 1, "parentheses do not match"
    return stack[0]  # pyright: ignore[reportReturnType]


def test_writing_is_allowed_in_its_folder_only(tmp_path: Path) -> None:
    parsed = rules(seatbelt.profile([tmp_path], [], network=False))
    assert parsed[:2] == [["version", "1"], ["allow", "default"]]
    writing = [rule for rule in parsed if "file-write*" in rule]
    # Of several rules that fit, the last one holds.
    assert writing == [["deny", "file-write*"], ["allow", "file-write*", ["subpath", f'"{tmp_path.resolve()}']]]


@pytest.mark.parametrize("network", [False, True])
def test_the_network(tmp_path: Path, network: bool) -> None:
    parsed = rules(seatbelt.profile([tmp_path], [], network))
    assert (["deny", "network*"] in parsed) is not network
    last = [rule for rule in parsed if "network*" in rule][-2:]
    assert [rule[0] for rule in last] == ["allow", "allow"], "its own unix sockets"
    assert all("unix-socket" in str(rule[2]) and str(tmp_path.resolve()) in str(rule[2]) for rule in last)


def test_others_are_not_signalled_and_secrets_not_read(tmp_path: Path) -> None:
    parsed = rules(seatbelt.profile([tmp_path], [tmp_path / "keys"], network=False))
    assert parsed.index(["deny", "signal"]) < parsed.index(["allow", "signal", ["target", "same-sandbox"]])
    assert ["deny", "file-read-data", ["subpath", f'"{tmp_path.resolve()}/keys']] in parsed


@pytest.mark.parametrize(
    "name", ['a "quoted" name', "back\\slash", "paren) (allow default", "spaces and ümlaut", "'single'", "#comment;"]
)
def test_any_name_is_one_string(tmp_path: Path, name: str) -> None:
    parsed = rules(seatbelt.profile([tmp_path / name], [], network=False))
    assert ["allow", "file-write*", ["subpath", f'"{tmp_path.resolve() / name}']] in parsed
    assert parsed == rules(seatbelt.profile([tmp_path / name], [], network=False))
    assert [rule for rule in parsed if rule == ["allow", "default"]] == [["allow", "default"]]


def test_without_seatbelt_it_says_so(tmp_path: Path) -> None:
    if Path(seatbelt._LIBRARY).exists():
        pytest.skip("this is a Mac")
    with pytest.raises(OSError, match="libsandbox"):
        seatbelt.restrict(seatbelt.profile([tmp_path], [], network=False))
