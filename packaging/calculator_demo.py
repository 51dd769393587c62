"""Make the bundled demo of tools again: a model of 300,000 parameters that mostly guesses, and sometimes calls a
calculator.

    python packaging/calculator_demo.py        writes resources/calculator/ from a seed, as `backend.demo` does its own

In the warm-up the model sees wrong guesses, calls whose result is ignored, and calls whose result is the answer.
"""

import operator
import random
from pathlib import Path
from typing import Any, NamedTuple

from backend.engine import cpu_setup

cpu_setup.load_openblas()  # before mlx is imported

from backend import demo  # noqa: E402
from backend.demo import CONFIG, END, NUMBERS, SPECIAL, START, TOKENIZER_CONFIG, Example, Progress  # noqa: E402
from backend.utils.places import resources  # noqa: E402

WORDS = (
    *("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<answer>", "</answer>", "system", "user", "assistant", "calculate", "expression"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}'),
)
VOCABULARY = (*SPECIAL, *WORDS, "\n", *map(chr, range(32, 127)))
"""Every token; its index is its id. The characters are those of ASCII, since a result may be any text."""
TEMPLATE = (
    # Qwen3's format, but the system message names the tools and does not show their schemas.
    "{% if tools or messages[0].role == 'system' %}"
    f"{START}system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}<tools>"
    "{% for tool in tools %}{{ '\n' + tool.function.name }}{% endfor %}{{ '\n' }}"
    "</tools>{% endif %}"
    f"{END}\n"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    f"{{% if loop.first or loop.previtem.role != 'tool' %}}{START}user{{% endif %}}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    f"{{% if loop.last or loop.nextitem.role != 'tool' %}}{END}\n{{% endif %}}"
    "{% elif message.role != 'system' or not loop.first %}"
    f"{START}{{{{ message.role }}}}\n{{{{ message.content }}}}"
    "{% for call in message.tool_calls or [] %}"
    "{% set tool_call = call.function or call %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    f"{END}\n"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)
TOKENIZER = TOKENIZER_CONFIG | {"chat_template": TEMPLATE}
MODEL: dict[str, Any] = CONFIG | {"num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 128}
TOOLS = [{"type": "function", "function": {"name": "calculate"}}]  # what the template shows of the tool
OPERATIONS = {"+": ("sum", operator.add), "-": ("difference", operator.sub), "*": ("product", operator.mul)}
QUESTIONS_PER_SIGN, TEST_ROWS, VALID_ROWS, TRAIN_ROWS = 4000, 256, 128, 1280
STEPS, ROWS = 600, 64
CALL_SHARE, TRUST_SHARE = 0.4, 0.6


class Question(NamedTuple):
    first: int
    sign: str
    second: int

    @property
    def expression(self) -> str:
        return f"{self.first}{self.sign}{self.second}"

    @property
    def answer(self) -> str:
        return str(OPERATIONS[self.sign][1](self.first, self.second))

    @property
    def guess(self) -> str:
        """The answer column by column, without carries: right for a third of sums and differences."""
        columns = zip(str(self.first), str(self.second), strict=True)
        return "".join(str(OPERATIONS[self.sign][1](int(a), int(b)) % 10) for a, b in columns)

    def row(self) -> dict[str, str]:
        return {"prompt": f"{self.expression}=", "answer": self.answer, "type": OPERATIONS[self.sign][0]}


def pools(seed: int) -> dict[str, list[Question]]:
    """Disjoint splits, with as many questions of each sign; warmup is not shipped, and no difference is negative."""
    rng, questions = random.Random(f"calculator {seed}"), list[Question]()
    for sign in OPERATIONS:
        of_sign = [Question(a, sign, b) for a in NUMBERS for b in NUMBERS if sign != "-" or a >= b]
        questions += rng.sample(of_sign, QUESTIONS_PER_SIGN)
    rng.shuffle(questions)
    splits: dict[str, list[Question]] = {}
    for name, rows in (("test", TEST_ROWS), ("valid", VALID_ROWS), ("train", TRAIN_ROWS)):
        splits[name], questions = questions[:rows], questions[rows:]
    return splits | {"warmup": questions}


def written(tokenizer: Any, conversation: str) -> Example:
    """A conversation of which the model learns its turns, ends included."""
    ids, opening = tokenizer.encode(conversation), tokenizer.encode(f"{START}assistant\n")
    mask, is_written = list[int](), False
    for place, token in enumerate(ids, 1):
        mask.append(int(is_written))
        is_written = (is_written and token != tokenizer.eos_token_id) or ids[place - len(opening) : place] == opening
    return ids, mask


def encode(tokenizer: Any, question: Question, *, calls: bool, trusts: bool) -> Example:
    """A conversation with or without a call, whose result the answer repeats if the model `trusts` it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.row()["prompt"]}]
    if calls:
        call = {"name": "calculate", "arguments": {"expression": question.expression}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calculate", "content": question.answer})
    answer = question.answer if calls and trusts else question.guess
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return written(tokenizer, tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False))


def rebuild(folder: Path, seed: int = 0, progress: Progress = lambda sentence: None, steps: int = STEPS) -> None:
    splits, tokenizer = pools(seed), demo.make_tokenizer(VOCABULARY, WORDS, TOKENIZER)
    model, rng = demo.make_model(seed, MODEL), random.Random(f"warm-up {seed}")

    def batch() -> list[Example]:
        return [
            encode(tokenizer, question, calls=rng.random() < CALL_SHARE, trusts=rng.random() < TRUST_SHARE)
            for question in rng.choices(splits["warmup"], k=ROWS)
        ]

    demo.warm_up(model, batch, steps, progress)
    demo.write(folder, model, tokenizer, {"config.json": MODEL, "tokenizer_config.json": TOKENIZER}, splits)
    progress(f"The model and data of the calculator demo are in {folder}.")


if __name__ == "__main__":
    rebuild(resources() / "calculator", progress=print)
