"""Whether a model's chat template ends, and in how much memory: tried once in a process of its own before it is rendered in ours.

A template is a program that came with the model. transformers renders it in Jinja's ImmutableSandboxedEnvironment, which keeps it from
files, processes and our objects; not from looping for ever or filling the memory. The child process
(`backend.models.template_child`) has limits on both. Most of what a template can do row by row is limited again where it is rendered
(`backend.data.chat_tokens`). A template that can only write out the messages needs no process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

from backend.models.template_limits import TIME_S, VERB
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.errors import UserError

LONGEST = 2**20
"""Characters of a template. The longest in use have some 30,000."""
START_S = 20.0
"""How long the child may take to start, on a busy machine."""

_PLAIN = (
    *(
        nodes.Template,
        nodes.Output,
        nodes.TemplateData,
        nodes.If,
        nodes.CondExpr,
        nodes.Name,
        nodes.Const,
        nodes.Getattr,
    ),
    *(
        nodes.Getitem,
        nodes.Slice,
        nodes.Compare,
        nodes.Operand,
        nodes.And,
        nodes.Or,
        nodes.Not,
        nodes.Test,
        nodes.Concat,
    ),
)
"""What a template may consist of that does no more work than it has characters, for each message."""
_PLAIN_FILTERS = ("trim", "length", "string", "tojson", "upper", "lower", "first", "last")
_PLAIN_CALLS = ("raise_exception",)


def check_template(tokenizer: Any, setting: str, name: str) -> None:
    """Raises UserError where rendering a tokenizer's chat template takes too long or too much memory. `name` is the model's, in the
    sentence. Each template is tried once in a process."""
    template = getattr(tokenizer, "chat_template", None)
    for text in template.values() if isinstance(template, Mapping) else [template]:
        if isinstance(text, str) and (reason := _reason(text)):
            raise UserError(setting, f"The chat template of {name} {reason}, so it cannot be used.")


@cache
def _reason(template: str) -> str:
    if len(template) > LONGEST:
        return f"is longer than {LONGEST:,} characters"
    return "" if _is_plain(template) else _tried(template)


def _is_plain(template: str) -> bool:
    environment = sandbox.ImmutableSandboxedEnvironment(extensions=[ext.loopcontrols])
    try:
        tree = environment.parse(template)
    except (jinja2.TemplateError, RecursionError):
        return False
    return all(_is_plain_node(child) for child in tree.find_all(nodes.Node)) and not _has_nested_loops(tree)


def _is_plain_node(node: nodes.Node) -> bool:
    if isinstance(node, nodes.For):
        return isinstance(node.iter, nodes.Name) and not node.recursive
    if isinstance(node, nodes.Filter):
        return node.name in _PLAIN_FILTERS and not node.args and not node.kwargs
    if isinstance(node, nodes.Call):
        return isinstance(node.node, nodes.Name) and node.node.name in _PLAIN_CALLS
    return isinstance(node, _PLAIN)


def _has_nested_loops(tree: nodes.Node) -> bool:
    return any(inner is not loop for loop in tree.find_all(nodes.For) for inner in loop.find_all(nodes.For))


def _tried(template: str) -> str:
    try:
        done = subprocess.run(
            module_command("backend.models.template_child", VERB), input=json.dumps(template).encode(), capture_output=True,
            env=backend_environment(), timeout=START_S + TIME_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"takes longer than {TIME_S:g} seconds for one message"
    words = done.stdout.decode(errors="replace").strip()
    if words == "fine":
        return ""
    return words or f"takes longer than {TIME_S:g} seconds for one message, or ends the process that renders it"
