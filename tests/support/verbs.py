"""The verbs of the command line, called in this process."""

from typer.testing import CliRunner, Result

from backend.__main__ import app

VERBS = app()


def call(*arguments: object, keys: str = "") -> Result:
    return CliRunner().invoke(VERBS, list(map(str, arguments)), input=keys)


def run_ok(*arguments: object) -> Result:
    """Call a verb that must exit with 0."""
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(*arguments: object) -> str:
    """Call a verb that must exit with 2, and return its only line on stderr."""
    result = call(*arguments)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == "" and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.endswith((".", "?"))
    return line
