#!/usr/bin/env python3
"""What weighs what in a frozen app, as a table in Markdown. Standard library only.

python packaging/size_table.py "dist/GRPO Studio"            the twenty heaviest parts, in MB
python packaging/size_table.py BEFORE AFTER                  two folders side by side
"""

import sys
from collections import Counter
from pathlib import Path

ROWS = 20
LIBRARIES = ("_internal", "Contents/Frameworks", "Contents/Resources")
"""PyInstaller's folders of everything but the executables, on Linux and in a Mac's .app."""


def sizes(bundle: Path) -> Counter[str]:
    """Bytes by part: an executable, a package with its bundled libraries (numpy.libs counts as numpy), or a library of
    the system.

    A file that several links lead to counts once.
    """
    found: Counter[str] = Counter()
    for path in bundle.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found[part_of(path.relative_to(bundle))] += path.stat().st_size
    return found


def part_of(path: Path) -> str:
    """The part that a file of the bundle belongs to."""
    within = next((path.relative_to(folder) for folder in LIBRARIES if path.is_relative_to(folder)), None)
    if within is None:
        return path.name
    if len(within.parts) == 1:
        return within.name.split(".so")[0] if ".so" in within.name else "other files"
    name = within.parts[0].split("-")[0].removesuffix(".libs")
    return "mlx" if name == "mlx_cpu" else "python" if name.startswith("python3") else name


def table(columns: dict[str, Counter[str]]) -> str:
    """Rows by the first column's size, the rest in one row, and the sum."""
    first = next(iter(columns.values()))
    heaviest = [part for part, _ in first.most_common(ROWS)]
    lines = [f"| part | {' | '.join(f'{name}, MB' for name in columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for part in heaviest:
        lines.append(f"| {part} | {' | '.join(megabytes(column[part]) for column in columns.values())} |")
    rest = [sum(size for part, size in column.items() if part not in heaviest) for column in columns.values()]
    lines.append(f"| everything else | {' | '.join(map(megabytes, rest))} |")
    lines.append(f"| **sum** | {' | '.join(f'**{megabytes(column.total())}**' for column in columns.values())} |")
    return "\n".join(lines)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size else "–"


def main() -> int:
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders or not all(folder.is_dir() for folder in folders):
        print(__doc__, file=sys.stderr)
        return 2
    names = ["size"] if len(folders) == 1 else ["before", "after"][: len(folders)]
    print(table(dict(zip(names, map(sizes, folders), strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
