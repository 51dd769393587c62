"""Recorded sessions (`recording`) as rows to train on."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.runs.events import read_events
from backend.utils.disk import replace_file
from backend.utils.errors import UserError
from backend.utils.text import quote

FILE, ROWS = "sessions.jsonl", "train.jsonl"
Line = dict[str, Any]


@dataclass(slots=True)
class Session:
    """`requests` in order; reward and group are the last that were posted."""

    name: str
    requests: list[Line] = field(default_factory=list[Line])
    reward: float | None = None
    group: str = ""

    @property
    def part(self) -> list[Line]:
        """The last request, and those that it continues, in order."""
        chain, number = list[Line](), len(self.requests) - 1
        while number is not None:
            chain.append(self.requests[number])
            number = chain[-1]["after"]
        return chain[::-1]

    @property
    def parts(self) -> int:
        """Requests that no other continues."""
        return len(self.requests) - len({request["after"] for request in self.requests} - {None})

    def left_out(self, *, without_reward: bool) -> str:
        """Why it cannot be trained on, or ""."""
        if not self.requests:
            return "they have no request"
        if self.reward is None and not without_reward:
            return "no reward was posted"
        if len({request["temperature"] for request in self.part}) > 1:
            return "their requests have several temperatures"
        if any(request["penalised"] for request in self.part):
            return "they were sampled with penalties"
        contents = [message["content"] for request in self.part for message in request["messages"]]
        return "" if all(isinstance(content, str) for content in contents) else "they have pictures"

    def completion(self) -> Line:
        """Its last part as one completion. The mask is 0 for what the model did not write."""
        part = self.part
        made: Line = {"before": part[0]["prompt"], "tokens": [], "logps": [], "log_kept": [], "mask": []}
        for number, request in enumerate(part):
            added, own = request["prompt"] if number else [], request["completion"]
            made["tokens"] += added + own
            made["logps"] += [0.0] * len(added) + request["logps"]
            made["log_kept"] += [0.0] * len(added) + (request["log_kept"] or [0.0] * len(own))
            made["mask"] += [0] * len(added) + [1] * len(own)
        of_last = {key: part[-1][key] for key in ("text", "stop", "temperature")}
        return made | of_last | {"session": self.name, "reward": self.reward}


def write_rows(folder: Path, group_size: int | None, *, without_reward: bool = False) -> Line:
    """Write train.jsonl, a row for every `group_size` sessions of a group (None: the usual number). → what was recorded
    and what is left out. Sessions without a posted group are grouped by their first messages. Raises UserError."""
    named: dict[str, Session] = {}
    for line in read_events(folder / FILE):
        session = named.setdefault(line["session"], Session(line["session"]))
        if "reply" in line:
            session.requests.append(line)
        else:
            session.reward, session.group = line["reward"], line["group"]
    if not named:
        raise UserError("folder", f"{quote(folder / FILE, 70)} has no sessions; record some with endpoint --record.")
    sessions, left_out = [*named.values()], Counter[str]()
    groups: dict[tuple[str, str], list[Session]] = {}
    for session in sessions:
        if reason := session.left_out(without_reward=without_reward):
            left_out[reason] += 1
            continue
        first = session.part[0]
        name = session.group or json.dumps(first["messages"], ensure_ascii=False)
        groups.setdefault((name, first["model"]), []).append(session)
    usual = max(Counter(map(len, groups.values())).items(), key=lambda pair: pair[::-1], default=(0, 0))[0]
    size, rows = group_size or usual, list[Line]()
    for (name, _), members in groups.items():
        whole = len(members) // size * size
        for start in range(0, whole, size):
            recorded = [session.completion() for session in members[start : start + size]]
            prompt = members[start].part[0]["messages"]
            rows.append({"prompt": prompt, "answer": "", "group": name, "recorded": recorded})
        if rest := len(members) - whole:
            left_out[f"their group has fewer than {size}" + (" more" if whole else "")] += rest
    replace_file(folder / ROWS, (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    listed = [
        {"group": name, "model": model, "rewards": [each.reward for each in members]}
        for (name, model), members in groups.items()
    ]
    counts = {"sessions": len(sessions), "requests": sum(len(session.requests) for session in sessions)}
    counts |= {"in_parts": sum(session.parts > 1 for session in sessions), "rows": len(rows), "group_size": size}
    return {**counts, "groups": listed, "left_out": dict(left_out)}
