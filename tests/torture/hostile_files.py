"""Files of rows as nobody should make them: every format, with broken bytes, encodings, structures and types, drawn from a seed."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

ODD_TEXTS = (
    "", " ", "\n", "\0", "\x1b[31mred\x1b[0m", "\u202egnirts", "\ud800", "é" * 300, "𝄞", "\ufeff", "a\rb\nc\r\nd", "<|im_end|>", "{{ 7 * 7 }}",
    "x" * 10_000, "= 1+1", "\u2028", "'; DROP", "A\u0301" * 40, "ﬃ" * 10, "\x07", "NaN", "null", "../../etc/passwd", "\t" * 50,
)  # fmt: skip
ODD_NUMBERS = (
    "1e999",
    "-1e999",
    "1" * 5000,
    "0" * 5000,
    "1e-400",
    "NaN",
    "-Infinity",
    "0x10",
    "1" * 400,
    "-0",
    "1.5e308",
    "007",
)
NAMES = (
    "prompt", "answer", "question", "messages", "system", "type", "text", "", " ", "prompt ", "p\nq", "\x00", "n" * 10_000, "\u202eprompt",
    "\ud800", "__class__", "🙂", "a,b", '"', "tools", "images",
)  # fmt: skip
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".tsv", ".txt", ".arrow", ".JSONL", ".jsonl.gz", ".zip", ".yaml", "")

MOST_READ = 10_000_000
"""Bytes of a file that is broken a second time: by then it may be a link to /dev/zero, or claim 100 GB of nothing."""


def beginning(file: Path) -> bytes:
    """What a torture takes of a file into its own memory. Raises OSError, also for what was made a pipe before: it would wait for a writer."""
    if file.is_fifo():
        raise OSError(f"{file} is a pipe")
    with file.open("rb") as stream:
        return stream.read(MOST_READ)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def text(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return f"What is {rng.randint(0, 99)} plus {rng.randint(0, 99)}?"
    return rng.choice(ODD_TEXTS) + (rng.choice(ODD_TEXTS) if rng.random() < 0.3 else "")


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(14 if depth < 3 else 7)
    if kind < 4:
        return text(rng)
    if kind < 7:
        return rng.choice([None, True, 0, -1, 2**63, 2**64, 1.5, float("inf"), float("nan"), 10**300, 1e308])
    if kind < 10:
        return messages(rng)
    if kind < 12:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def messages(rng: random.Random) -> Any:
    """A chat of the right shape, or nearly."""
    role = rng.choice(["user", "system", "assistant", "tool", "", "\n", 7, None, "u" * 3000, "\ud800"])
    good = {"role": "user", "content": text(rng)}
    content: Any = rng.choice(
        [text(rng), None, 7, [{"type": "text", "text": "hi"}], [{"type": "image"}], {}, ["a"], b"raw".hex()]
    )
    odd = rng.choice(
        [
            {"role": role, "content": content},
            {"content": "x"},
            {"role": "user"},
            {},
            "user: hi",
            None,
            [good],
            good | {"tool_calls": [{}]},
        ]
    )
    return rng.choice([[good], [good, odd], [odd], [], good, [good] * 40])


def row(rng: random.Random) -> dict[str, Any]:
    made = {"prompt": text(rng), "answer": str(rng.randint(0, 99))}
    for _ in range(rng.randrange(3)):
        made[rng.choice(NAMES)] = value(rng)
    if rng.random() < 0.2:
        made.pop(rng.choice(list(made)))
    if rng.random() < 0.3:
        made["prompt"] = value(rng)
    return made


def rows(rng: random.Random) -> list[dict[str, Any]]:
    if rng.random() < 0.02:
        names = [f"c{number}" for number in range(rng.choice([300, 3000]))]
        return [dict.fromkeys(names, 1) | {"prompt": "hi", "answer": "1"}]
    return [row(rng) for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 12]))]


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def as_jsonl(rng: random.Random) -> bytes:
    lines = [as_json_text(made, rng) for made in rows(rng)]
    if rng.random() < 0.15:
        lines.insert(rng.randrange(len(lines) + 1), odd_json(rng))
    return rng.choice(["\n", "\n", "\r\n", "\r", "\n\n", " \n"]).join(lines).encode("utf-8", "surrogatepass")


def as_json_text(content: Any, rng: random.Random) -> str:
    written = json.dumps(content, ensure_ascii=rng.random() < 0.5)
    return written.replace('"7"', rng.choice(ODD_NUMBERS)) if rng.random() < 0.1 else written


def odd_json(rng: random.Random) -> str:
    deep = rng.choice([60, 200, 2000, 100_000])
    number = rng.choice(ODD_NUMBERS)
    return rng.choice([
        "[" * deep, '{"a":' * deep, '{"prompt": ' + "[" * deep + "]" * deep + "}", f'{{"prompt": {number}, "answer": {number}}}', number,
        '{"prompt": "a", "prompt": "b"}', "[1, 2]", "null", "true", '"text"', "{'prompt': 'x'}", '{"prompt": "x",}', '{"prompt": "\\ud800"}',
        '{"prompt": "\\u0000"}', "\0" * 50, '{"prompt": "unended', "{" * 3, '{"": {}}', "// a comment",
    ])  # fmt: skip


def as_json(rng: random.Random) -> bytes:
    content = "[" + ",".join(as_json_text(made, rng) for made in rows(rng)) + "]"
    return (odd_json(rng) if rng.random() < 0.2 else content).encode("utf-8", "surrogatepass")


def as_csv(rng: random.Random) -> bytes:
    names = ["prompt", "answer", *(rng.choice(NAMES) for _ in range(rng.randrange(3)))]
    quote = rng.choice(['"', '"', "", "'"])
    separator = rng.choice([",", ",", ",", ";", "\t", "|"])
    lines = [separator.join(names)]
    for _ in range(rng.randrange(6)):
        cells = [text(rng) for _ in range(len(names) + rng.choice([0, 0, 0, -1, 1]))]
        lines.append(separator.join(quote + cell.replace(quote or "\1", quote * 2) + quote for cell in cells))
    return rng.choice(["\n", "\r\n", "\r"]).join(lines).encode("utf-8", "surrogatepass")


def as_parquet(rng: random.Random) -> bytes:
    count = rng.randrange(5)
    day = 24 * 3600
    columns: list[Any] = [
        pyarrow.array([f"Prompt {number}" for number in range(count)]), pyarrow.array([str(number) for number in range(count)]),
        pyarrow.array([[{"role": "user", "content": "hi"}]] * count), pyarrow.array([b"\xff\xfe raw"] * count),
        pyarrow.array([2**50] * count, pyarrow.timestamp("ms")), pyarrow.array([day] * count, pyarrow.timestamp("ns", tz="Mars/Olympus")),
        pyarrow.array([1] * count, pyarrow.duration("ns")), pyarrow.nulls(count), pyarrow.array([2**31 - 1] * count, pyarrow.date32()),
        pyarrow.array([[("a", 1)]] * count, pyarrow.map_(pyarrow.string(), pyarrow.int64())), pyarrow.array([1.5] * count, pyarrow.float16()),
        pyarrow.array(["x"] * count).dictionary_encode(), pyarrow.array([b"\xff" * 4] * count, pyarrow.binary()).cast(pyarrow.binary(4)),
        pyarrow.array([b"\x80abc"] * count, pyarrow.binary()).view(pyarrow.string()), pyarrow.array([10**30] * count, pyarrow.decimal128(38)),
        pyarrow.array([1] * count, pyarrow.time64("ns")), pyarrow.array([{"a": {"b": [None]}}] * count),
    ]  # fmt: skip
    names = ["prompt", "answer", *(rng.choice(NAMES).encode("utf-8", "replace").decode() for _ in range(3))]
    chosen = [*columns[:2], *(rng.choice(columns) for _ in range(3))]
    if rng.random() < 0.3:
        chosen[0] = rng.choice(columns)
    stream = io.BytesIO()
    table = pyarrow.Table.from_arrays(chosen, names=names)
    pyarrow.parquet.write_table(table, stream, compression=rng.choice(["none", "gzip", "zstd", "snappy"]))
    return stream.getvalue()


@cache
def bomb(kind: str) -> bytes:
    """Small files that stand for large ones."""
    if kind == "gzip":
        return gzip.compress(b'{"prompt": "x"}\n' * 200_000)
    if kind == "zip":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("train.jsonl", b"0" * 10_000_000)
        return stream.getvalue()
    stream = io.BytesIO()
    if kind == "rows":
        zeros = pyarrow.RecordBatch.from_arrays([pyarrow.array([0] * 1_000_000)], names=["prompt"])
        with pyarrow.parquet.ParquetWriter(stream, zeros.schema) as writer:
            for _ in range(30):
                writer.write_batch(zeros)
    else:
        cells = pyarrow.array(["y" * 1_000_000]).dictionary_encode()
        wide = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3000, pyarrow.int32()), cells.dictionary)
        pyarrow.parquet.write_table(pyarrow.table({"prompt": wide}), stream, compression="zstd")
    return stream.getvalue()


def content(rng: random.Random, suffix: str) -> bytes:
    makers: dict[str, Callable[[random.Random], bytes]] = {
        ".json": as_json,
        ".csv": as_csv,
        ".parquet": as_parquet,
        ".tsv": as_csv,
    }
    made = makers.get(suffix.lower(), as_jsonl)(rng)
    if rng.random() < 0.05:  # another format's content
        made = rng.choice([as_jsonl, as_json, as_csv, as_parquet])(rng)
    if rng.random() < 0.004:
        made = bomb(rng.choice(["gzip", "zip", "rows", "cells"]))
    if rng.random() < 0.004:
        made = (
            b'{"answer": "1", "prompt": "'
            + rng.choice([b"7", b"x ", b"\xc3\xa9", b" "]) * rng.choice([300_000, 3_000_000])
            + b'"}'
        )
    return mutated(made, rng) if rng.random() < 0.5 else made


def mutated(made: bytes, rng: random.Random) -> bytes:
    """The bytes with one thing wrong."""
    place = rng.randrange(len(made) + 1)
    kind = rng.randrange(12)
    if kind == 0:
        return made[:place]
    if kind == 1:
        return made[:place] + rng.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b'"', b"\r", b"\x1a"]) + made[place:]
    if kind == 2:
        end = min(len(made), place + rng.choice([1, 10, 100]))
        return made[:place] + rng.randbytes(end - place) + made[end:]
    if kind == 3:
        return b"\xef\xbb\xbf" * rng.choice([1, 2]) + made
    if kind in (4, 5):
        words = made.decode("utf-8", "replace")
        return words.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "cp037"]), "replace")
    if kind == 6:
        return made + made
    if kind == 7:
        return gzip.compress(made)
    if kind == 8:
        return made[place:] + made[:place]
    if kind == 9:
        return made.replace(b"prompt", rng.choice([b"Prompt", b"pro\0mpt", b"", b"answer"]))
    if kind == 10:
        return rng.randbytes(rng.choice([0, 1, 8, 500]))
    return made.replace(b",", rng.choice([b",,", b"", b";"]))


def put(folder: Path, rng: random.Random) -> str:
    """Write one dataset into an empty folder; returns what the setting `data` would say."""
    suffix = rng.choice(SUFFIXES[:4]) if rng.random() < 0.85 else rng.choice(SUFFIXES)
    place = folder / f"train{suffix}"
    kind = rng.random()
    if kind < 0.75:
        place.write_bytes(content(rng, suffix))
        return str(place)
    if kind < 0.95:
        for name in ("train", *rng.sample(["valid", "validation", "test", "dev", "README", "exam"], 2)):
            other = rng.choice([suffix, rng.choice(SUFFIXES)])
            (folder / f"{name}{other}").write_bytes(content(rng, other))
        if rng.random() < 0.2:
            card = rng.choice(
                ["configs:\n- data_files: /etc/passwd", "a: &a [*a]", "!!python/object:os.system x", "- " * 3000]
            )
            (folder / "README.md").write_text(f"---\n{card}\n---\n")
            (folder / "data").mkdir()
            (folder / "data" / "train-00000-of-00001.parquet").write_bytes(content(rng, ".parquet"))
        return str(folder)
    odd = rng.randrange(10)
    if odd == 0:
        place.symlink_to(place)
    elif odd == 1:
        os.mkfifo(place)
    elif odd == 2:
        place.mkdir()
    elif odd == 3:
        place.symlink_to("/dev/zero")
    elif odd == 4:
        place.symlink_to(folder / "nowhere")
    elif odd == 5:
        with place.open("wb") as file:
            file.truncate(rng.choice([10**6, 10**12]))  # a file of holes: claims its size
    elif odd == 6:
        (folder / "a").symlink_to(folder)
        place.write_bytes(content(rng, suffix))
    elif odd == 7:
        os.mkfifo(folder / "train.jsonl")
        return str(folder)
    elif odd == 9:
        place.symlink_to(rng.choice(["/proc/kmsg", "/proc/self/environ", "/proc/self/mem"]))
    elif odd == 8:
        return rng.choice(
            [
                "~nosuchuser/x.jsonl",
                "x\0y.jsonl",
                "n" * 5000,
                "/" + "d/" * 3000,
                "\ud800",
                "/dev/stdin",
                "./\n.csv",
                f"{folder}/{'é' * 250}",
            ]
        )
    return str(place)
