"""Judges that ask a server: prompts, replies, failures, and what is kept."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import keyring
import pytest

from backend.judges.agreement import Examination
from backend.judges.judge import FILE, Judge, UnreadableError, read_group, read_single
from backend.judges.model_reward import UnreachableJudgeError
from backend.judges.rubric import Rubric, bundled_rubrics, read_rubric
from backend.judges.server import find_servers, save_key
from backend.rewards.allowed_code import allow_named, require_allowed
from backend.rewards.calls import Poll, wait_on
from backend.rewards.catalogue import RewardCall
from backend.rewards.scoring import Answer, TrainerState
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from tests.support.judge_server import JudgeServer, judge_server, trajectories
from tests.support.keychain import Keychain
from tests.support.scoring import make_group


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


@pytest.fixture
def judge_of(server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("backend.judges.judge.BREAK_S", 0.0)
    opened = list[Judge]()

    def make(folder: Path | None = tmp_path, **arguments: Any) -> Judge:
        judge = Judge(RewardCall("judge", {"rubric": "Be nice.", "url": server.url} | arguments, "nice"))
        opened.append(judge)
        judge.load(folder)
        return judge

    yield make
    for judge in opened:
        judge.close()


@pytest.fixture
def keychain(monkeypatch: pytest.MonkeyPatch) -> Keychain:
    keychain = Keychain()
    monkeypatch.setattr(keyring, "get_keyring", lambda: keychain)
    return keychain


def scored(judge: Judge, *groups: Group, poll: Poll = wait_on) -> Answer:
    return judge.score(groups, TrainerState(), poll)


def test_a_group_is_one_call_and_equal_completions_are_sent_once(server: JudgeServer, judge_of) -> None:
    server.score = lambda text: {"aaa": 0.25, "bb": 0.5, "c": 1.0}[json.loads(text)]
    judge, group = judge_of(), make_group("c", "bb", "aaa", "bb", "c", "c", "bb", "aaa")
    report = scored(judge, group)
    assert report.scores == [[1.0, 0.5, 0.25, 0.5, 1.0, 1.0, 0.5, 0.25]]
    assert len(server.calls) == 1 and len(trajectories(server.calls[0])) == 3
    assert server.calls[0][1]["content"].count("What is 2 + 2?") == 1, "the shared prompt is sent once"
    assert report.metrics.keys() == {f"judge/nice/{kind}" for kind in ("failed", "calls", "cached", "seconds")}
    assert report.columns["nice/explanation"][0].startswith("about")
    again = scored(judge, group)
    assert len(server.calls) == 1 and again.scores == report.scores and again.metrics["judge/nice/cached"] == 1.0


def test_the_order_of_a_group_depends_on_its_content_alone(server: JudgeServer, judge_of) -> None:
    texts = [f"text {i}" for i in range(8)]
    for folder in (None, None):
        scored(judge_of(folder), make_group(*(texts if not server.calls else reversed(texts))))
    listed = [[json.loads(text) for text in trajectories(call).values()] for call in server.calls]
    assert listed[0] == listed[1] != sorted(texts)


def test_a_judge_reads_messages_with_values_that_json_lacks(server: JudgeServer, judge_of) -> None:
    group = make_group("a", "b")
    group.problem.messages.append({"role": "user", "content": "hi", "sent": datetime(2024, 5, 1)})
    assert scored(judge_of(), group).scores == [[0.5, 0.5]] and "2024-05-01" in server.calls[0][1]["content"]


def test_criteria_are_weighted(server: JudgeServer, judge_of, tmp_path: Path) -> None:
    rubric = tmp_path / "mine.toml"
    criteria = [{"name": "true", "weight": 3}, {"name": "clear", "choices": ["bad", "fair", "good"]}]
    Rubric.model_validate({"title": "Mine", "text": "Be strict.", "criteria": criteria}).save(rubric)
    judge = judge_of(mode="single", rubric=str(rubric))
    server.reply = lambda messages: json.dumps(
        {"true": {"reason": "so", "verdict": "Yes"}, "clear": {"reason": "meh", "verdict": "fair"}}
    )
    report = scored(judge, make_group("a", "b", "a"))
    assert report.scores == [[3.5 / 4] * 3] and len(server.calls) == 2
    assert report.columns["nice/explanation"][0] == "true: Yes. so\nclear: fair. meh"
    ends = {call[1]["content"].partition("<answer>")[2] for call in server.calls}  # in either order
    assert ends == {"\na\n</answer>", "\nb\n</answer>"}


GOOD = '{"scores": [{"trajectory_id": "1", "explanation": "x", "score": 1}, {"trajectory_id": 2, "score": 0.5}]}'


@pytest.mark.parametrize(
    ("reply", "scores"),
    [
        (GOOD, [1.0, 0.5]),
        (f"<think>{{1}} so</think>Here, with \\frac{{1}}{{2}}:\n```json\n{GOOD}\n```\nDone.", [1.0, 0.5]),
        (GOOD.replace('"x"', '"\\(x\\)\n"'), [1.0, 0.5]),
        (GOOD.replace('"x"', '"after </think> none"'), [1.0, 0.5]),
        (GOOD[:-30], None),
        ("no JSON", None),
        (GOOD.replace("0.5", "5"), None),
        (GOOD.replace("0.5", '"0.5"'), None),
        (GOOD.replace("0.5", "NaN"), None),
        (GOOD.replace("2", "1"), None),
        ('{"scores": null}', None),
        ("[1, 2]", None),
        ('{"scores": ' + "[" * 100_000, None),
    ],
)
def test_replies_of_a_group(reply: str, scores: list[float] | None) -> None:
    if scores is None:
        with pytest.raises(UnreadableError):
            read_group(reply, 2)
    else:
        assert [score for score, _ in read_group(reply, 2)] == scores


def test_a_verdict_that_is_no_choice_is_unreadable() -> None:
    rubric = read_rubric("clear_writing")
    verdicts = {each.name: {"reason": "", "verdict": each.choices[-1]} for each in rubric.criteria}
    assert read_single(json.dumps(verdicts), rubric)[0] == 1.0
    for wrong in ("perhaps", None, True):
        with pytest.raises(UnreadableError, match="plain"):
            read_single(json.dumps(verdicts | {"plain": {"verdict": wrong}}), rubric)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 500}, "answered 500 (the judge is ill)"),
        ({"status": 400, "failure": {"object": "error", "message": "too long"}}, "answered 400 (too long)"),
        ({"status": 404, "failure": {"error": "no model"}}, 'answered 404 ({"error": "no model"})'),
        ({"delay_s": 5.0}, "within 0.15 s"),
        ({"reply": lambda messages: "They are all nice."}, "no JSON object"),
        ({"choices": []}, "answered without a chat completion"),
        ({"choices": [{"message": {"content": [{"type": "text"}]}}]}, "answered without a chat completion"),
    ],
)
def test_failures_give_none_and_one_message(server: JudgeServer, judge_of, fault: dict[str, Any], message: str) -> None:
    before = {name: getattr(server, name) for name in fault}
    vars(server).update(fault)
    judge = judge_of(mode="single", timeout=0.15 if "delay_s" in fault else 5.0)
    notes = list[str]()
    for _ in range(2):
        report = scored(judge, make_group("a", "b"), make_group("c", "d"))
        notes += report.notes
        assert report.scores == [[None] * 4] and report.metrics["judge/nice/failed"] == 1.0
        assert report.metrics["judge/nice/calls"] == 8, "two tries of each, and failures are not kept"
    (note,) = notes
    assert message in note
    vars(server).update(before)
    assert scored(judge, make_group("a", "b")).scores == [[0.5, 0.5]]


def test_judgements_outlive_a_kill(server: JudgeServer, judge_of, tmp_path: Path) -> None:
    server.score = lambda text: len(text) / 30
    groups = [make_group(f"{n}", f"{n} again") for n in range(3)]
    before = scored(judge_of(), *groups)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "of a line that was cut')
    calls, judge = len(server.calls), judge_of()
    after = scored(judge, *groups)
    assert after.scores == before.scores and after.columns == before.columns and len(server.calls) == calls
    scored(judge, make_group("new"))
    assert [*json.loads((tmp_path / FILE).read_text().splitlines()[-1])] == ["key", "scores", "explanations"]
    assert "key" not in (tmp_path / FILE).read_text().replace('{"key"', "")


def stop() -> None:
    raise KeyboardInterrupt


def test_a_group_is_judged_while_others_are_decoded_and_a_stop_does_not_wait(server: JudgeServer, judge_of) -> None:
    judge, first, last = judge_of(), make_group("a", "b"), make_group("c", "d")
    judge.start(first)
    until = time.monotonic() + 20
    while not judge._known and time.monotonic() < until:
        time.sleep(0.01)
    assert scored(judge, first, poll=stop).scores == [[0.5, 0.5]], "nothing is waited for"
    server.delay_s = 30.0
    with pytest.raises(KeyboardInterrupt):
        scored(judge, last, poll=stop)
    judge.close()
    assert time.monotonic() < until and len(server.calls) == 2


def test_a_server_that_is_gone(server: JudgeServer, judge_of) -> None:
    pausing, going_on = judge_of(None), judge_of(None, when_unreachable="skip")
    assert scored(pausing, make_group("known")).scores == [[0.5]]
    server.stop()
    with pytest.raises(UnreachableJudgeError, match="does not answer"):
        scored(pausing, make_group("known"), make_group("a"))
    report = scored(going_on, make_group("a"))
    assert report.scores == [[None]] and "does not answer" in report.notes[0]
    server.start()
    assert scored(pausing, make_group("known"), make_group("a")).scores == [[0.5, 0.5]]
    assert len(server.calls) == 2


def test_asked_afresh(server: JudgeServer, judge_of) -> None:
    server.score = lambda text: len(text) / 10
    for mode, calls in (("group", 1), ("single", 2)):
        judge, problem, before = judge_of(None, mode=mode), Problem(0, "2 + 2?", [], [], ""), len(server.calls)
        for order in ([0, 1], [1, 0]):
            lengths = [3, 5] if mode == "group" else [1, 3]  # a group's are JSON
            found = judge.ask_afresh([(problem, ["b", "aaa"], order)], wait_on)
            assert found == [[length / 10 for length in lengths]]
        assert len(server.calls) - before == 2 * calls


def test_a_check_says_why_there_are_no_scores(server: JudgeServer) -> None:
    server.status, judge = 429, Judge(RewardCall("judge", {"rubric": "Be nice.", "url": server.url}))
    found = Examination(judge, [make_group("a", "b")], ()).run()
    assert "100% of completions got no score: its server answered 429 (the judge is ill)" in found.verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "both"}, "mode must be group or single"),
        ({"url": "localhost:1234"}, "url must be local or begin with http"),
        ({"url": "https://me:secret@host/v1"}, "keychain"),
        ({"url": "local"}, "needs a model"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
        ({"when_unreachable": "stop"}, "pause or skip"),
        ({"rubric": " "}, "rubric is empty"),
        ({"rubric": "helpful_answr"}, "nearest is helpful_answer"),
        ({"rubric": "missing.toml"}, "There is no file"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Judge(RewardCall("judge", arguments))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = 3", "title: "),
        ('criteria = [{name = "a"}, {name = "A"}]', "twice"),
        ('criteria = [{name = "a", choices = ["x"]}]', "choices"),
        ('criteria = [{name = "a", wait = 1}]', "wait"),
        ('title = "empty"', "needs a text or criteria"),
        ("criteria = [", "cannot be used"),
    ],
)
def test_rubrics_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_rubric(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_bundled_rubrics_survive_saving(tmp_path: Path, suffix: str) -> None:
    assert len(bundled_rubrics()) == 3
    for name in bundled_rubrics():
        rubric = read_rubric(name)
        rubric.save(path := tmp_path / f"{name}{suffix}")
        assert read_rubric(str(path)) == rubric


def test_another_machine_is_asked_about_once(apart: Path) -> None:
    entry = 'judge(url="https://judge.example/v1")'
    for settings in ({"reward_functions": entry}, {"stages": [{"reward_functions": [entry]}]}):
        with pytest.raises(UserError, match=r"judge\.example would get the prompts and completions"):
            require_allowed(settings)
    allow_named({"reward_functions": [entry]})
    here = ['judge(url="http://localhost:1/v1", name=here)', "judge(url=local)", 'judge(url="http://[::1")']
    require_allowed({"reward_functions": [entry, *here]})
    with pytest.raises(UserError, match=r"other\.example"):
        require_allowed({"reward_functions": [entry.replace("judge.e", "other.e")]})


def test_a_key_goes_to_its_own_host(server: JudgeServer, judge_of, keychain: Keychain, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    scored(judge_of(), make_group("a"))
    save_key("127.0.0.1", "sk-kept")
    scored(judge_of(), make_group("b"))
    used = [headers["authorization"] for headers in server.headers]
    assert used == ["Bearer sk-of-the-environment", "Bearer sk-kept"]
    save_key("127.0.0.1", "")
    assert not keychain.entries
    monkeypatch.setenv("OPENAI_API_KEY", "ключ")
    assert scored(judge_of(), make_group("c")).scores == [[0.5]], "the server decides about a key, not the client"


def test_nothing_follows_a_redirect(server: JudgeServer, judge_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-one-host")
    with judge_server() as other:
        judge, server.leads_to = judge_of(), other.url
        assert scored(judge, make_group("a")).scores == [[None]] and not other.calls
        with pytest.raises(UserError, match="answered 307"):
            judge_of()


def test_servers_are_found(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.judges.server.KNOWN_SERVERS", (("LM Studio", server.port), ("Ollama", 9)))
    (found,) = find_servers()
    assert (found["name"], found["models"]) == ("LM Studio", ("fake-judge",))


def test_a_conversation_is_read_as_its_messages(server: JudgeServer, judge_of) -> None:
    turns = [Turn("Let me see.", [ToolCall("add", {"a": 2})], 3, [ToolResult("add", "4")], 2), Turn("It is 4.", [], 2)]
    group = make_group("a", "b")
    group.completions[1] = Completion([1], [0.0], "It is 4.", "eos", turns=turns)
    scored(judge_of(), group)
    assert "tool_calls" in server.calls[0][1]["content"] and "It is 4." in server.calls[0][1]["content"]
