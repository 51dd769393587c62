"""The settings of constrained output, without the engine."""

from typing import Any

from backend.utils.documents import parse_json
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path
from backend.utils.text import quote


def schema_text(value: str) -> str:
    """The JSON schema of `output_schema`: itself where it begins with a brace, else the text of that file. Raises
    UserError."""
    text, what = value.strip(), "The text of Output schema"
    if not text.startswith("{"):
        path = user_path(text, "output_schema")
        text, what = read_text(path, "output_schema"), quote(path, 70)
    schema: Any = parse_json(text, what, "output_schema")
    if not isinstance(schema, dict):
        raise UserError("output_schema", f"{what} must be a JSON schema, which is an object in braces.")
    return text
