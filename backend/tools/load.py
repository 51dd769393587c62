"""The tools and environments that a run's settings name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from backend.config.config import Config, keys_used_by
from backend.rewards.allowed_code import AllowedCode, AllowedServers
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.rewards.scorer import Scorer, begin_scorer
from backend.tools.host import NO_TOOLS, ToolHost, ToolSchemas
from backend.tools.mcp_servers import McpServers
from backend.tools.mcp_settings import openenv_servers
from backend.tools.openenv import openenv_tools
from backend.tools.scorer_tools import ScorerTools, tool_names
from backend.tools.several import SeveralHosts
from backend.utils.errors import UserError


def uses_tools(config: Config) -> bool:
    return bool(config.tools_file or config.environment or config.mcp_servers)


def load_tools(config: Config, scorer: Scorer) -> ToolHost | None:
    """Load the tools of a run into the process of its reward functions, before anything else loads these, and start its
    servers, which closing the scorer ends. None for a run without tools. Raises UserError."""
    hosts, taken = list[ToolHost](), dict[str, str]()
    if config.tools_file or config.environment:
        from backend.tools.toolbox import run_tools  # imports transformers

        scorer.tools = scorer.tools or run_tools(config)
        column = config.environment_column if isinstance(config.environment, Mapping) else ""
        hosts.append(ScorerTools(scorer, column, config.tool_timeout))
        for schemas in (hosts[0].schemas.by_environment or {}).values():
            taken |= dict.fromkeys(tool_names(schemas), "an environment")
        taken |= dict.fromkeys(tool_names(hosts[0].schemas.shared), "the tools file")
        if served := openenv_servers(config.environment):
            if both := taken.keys() & {title for title, _ in served.values()}:
                raise UserError("environment", f"{both.pop()} is an OpenEnv environment and a tool; rename one.")
            taken |= {title: "an environment" for title, _ in served.values()}
            hosts.append(openenv_tools(served, config.environment, column, config.tool_timeout, scorer.closing))
    if config.mcp_servers:
        hosts.append(McpServers(config.mcp_servers, config.tool_timeout, taken))
        scorer.closing.callback(hosts[-1].close)
    return SeveralHosts(hosts) if len(hosts) > 1 else next(iter(hosts), None)


def shown_tools(config: Config) -> tuple[ToolSchemas, str]:
    """Tools that prompts show, read in a process that ends again, or none and the sentence of `begin_tools`."""
    with ExitStack() as stack:
        tools, why_not = begin_tools(config, stack)
        return tools.schemas if tools else NO_TOOLS, why_not


def begin_tools(config: Config, stack: ExitStack) -> tuple[ToolHost | None, str]:
    """The tools of a run in a process that `stack` ends, or none and a sentence that says why: they were never allowed
    to run here, or fail."""
    named = {key: getattr(config, key) for key in (*keys_used_by("tools"), "reward_network")}
    if not uses_tools(config):
        return None, ""
    if AllowedCode().missing(named) or AllowedServers().missing(named):
        return None, "The tools were never allowed to run on this machine, so prompts are without them here."
    update = {"reward_isolation": "process", "reward_functions": list(DEFAULT_REWARDS), "stages": []}
    scorer = begin_scorer(config.model_copy(update=update | {"reward_functions_file": ""}))
    stack.callback(scorer.close)
    try:
        return load_tools(config, scorer), ""
    except UserError as error:
        return None, error.faults[0].sentence
