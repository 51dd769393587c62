"""All rules, in the order in which their findings are shown: the worst and the most basic first. To add one, write it in a module of
its kind and it is here, in the diary, on the Monitor page, in `doctor` and, once tested, in docs/health.md."""

from __future__ import annotations

from backend.spec.health.completion_rules import COMPLETION_RULES
from backend.spec.health.finding import Finding
from backend.spec.health.learning_rules import LEARNING_RULES
from backend.spec.health.recent import Recent
from backend.spec.health.resource_rules import RESOURCE_RULES
from backend.spec.health.reward_rules import REWARD_RULES

RULES = {rule.code: rule for rule in (*REWARD_RULES, *COMPLETION_RULES, *LEARNING_RULES, *RESOURCE_RULES)}
"""Code → rule."""


def findings(recent: Recent) -> list[Finding]:
    """What all rules find at the newest step."""
    return [finding for rule in RULES.values() if (finding := rule.find(recent)) is not None]
