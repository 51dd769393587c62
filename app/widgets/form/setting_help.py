"""What is to be known about a setting, for the column beside the form."""

from __future__ import annotations

from app.widgets.form.value_text import limits_text
from backend.spec.other_programs.translation import other_names
from backend.spec.setting import Setting


def help_lines(setting: Setting) -> list[str]:
    """Its help, its limits, its names in other programs, its choices: a line each, where there is one."""
    names = other_names(setting.key)
    elsewhere = f"Elsewhere called {', '.join(names)}." if names else ""
    choices = [f"{choice.label}: {choice.sentence}" for choice in setting.choices if choice.sentence]
    return [line for line in (setting.help, limits_text(setting), elsewhere, *choices) if line]
