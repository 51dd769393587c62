"""`python -m benchmarks WORD`: speed and memory, ours alone, beside the peers, and with techniques switched off."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.engine import cpu_setup

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Rounds = Annotated[int, typer.Option(min=1, help="Steps to take the median of.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Steps before them, which do not count.")]
Out = Annotated[Path | None, typer.Option("--json", help="Also write every measured step to this file.")]
Only = Annotated[str, typer.Option(help="Only the cases with this in their name.")]


def add_section(verb: str, section: str, usual_rounds: int, help_: str) -> None:
    @app.command(verb, help=help_)
    def run(rounds: Rounds = usual_rounds, warm_up: WarmUp = 2, json_file: Out = None, only: Only = "") -> None:
        _section(section, rounds, warm_up, json_file, only)


axes = "group size, completion length, prompts a step, vocabulary, depth and prompt length"
add_section("ours", "ours", 3, "Ours alone: a few whole steps. What `make bench` runs.")
add_section("against", "against", 7, "Ours beside the peers and the plain ways, and the bars.")
add_section("ablate", "ablation", 7, "Ours with each technique switched off in turn.")
add_section("sweep", "sweep", 3, f"Ours over {axes}.")
add_section("samples", "samples", 3, "The cost of a sample, by how many rows are decoded together.")


@app.command()
def demo(
    config: Annotated[Path | None, typer.Argument(help="The settings, a YAML file; the demo's if left out.")] = None,
    rounds: Rounds = 7,
    warm_up: WarmUp = 2,
    json_file: Out = None,
) -> None:
    """The trainer's own account of a step of the demo, or of any config."""
    blas_sentence = cpu_setup.load_openblas()
    from backend.utils.places import demo_config
    from benchmarks import demo_step

    medians = demo_step.measure(config or demo_config(), rounds, warm_up)
    demo_step.table(config.name if config else "the demo", medians).show()
    print(blas_sentence)
    if json_file:
        json_file.write_text(json.dumps({"blas": blas_sentence, "rounds": rounds, "medians": medians}, indent=1) + "\n")


@app.command()
def start(rounds: Rounds = 3, warm_up: WarmUp = 1, json_file: Out = None) -> None:
    """From nothing to the first token and the first step, in fresh processes."""
    _section("start", rounds, warm_up, json_file, "")


@app.command()
def trackers(
    pairs: Annotated[int, typer.Option(min=1, help="Runs with each tracker, and as many without.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 60,
    only: Annotated[list[str] | None, typer.Option(help="These trackers; all that are installed if left out.")] = None,
    lock: Annotated[Path | None, typer.Option(help="A file that is locked meanwhile.")] = None,
) -> None:
    """What a tracker costs its run: the demo with each, and without."""
    from contextlib import nullcontext

    from backend.trainer.trackers.targets import TRACKERS
    from backend.utils.file_lock import held
    from benchmarks import trackers as measurement

    names = only or [name for name, kind in TRACKERS.items() if kind.is_installed]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(TRACKERS)}.")
    with held(lock) if lock else nullcontext():
        measurement.table(measurement.measure(names, pairs, steps, note=print)).show()


@app.command()
def record(
    sections: Annotated[list[str] | None, typer.Argument(help="Which of them; all if left out.")] = None,
    rounds: Rounds = 7,
    warm_up: WarmUp = 2,
) -> None:
    """Measure everything and write docs/performance.json and the tables of docs/performance.md from it."""
    cpu_setup.load_openblas()  # before anything here imports mlx
    from benchmarks import report, results_file

    unknown = [name for name in sections or () if name not in report.DOCUMENTED]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(report.DOCUMENTED)}.")
    for name in sections or report.DOCUMENTED:
        results_file.store(name, _measured(name, rounds, warm_up, ""), results_file.about(rounds, warm_up))


@app.command()
def exports(
    folder: Annotated[
        Path, typer.Argument(help="Where runs and exports are kept: what is there is not trained again.")
    ],
) -> None:
    """What every format of an export keeps and costs; writes the tables of docs/exports.md. Twenty minutes on two CPU
    cores."""
    from benchmarks import exports as measurements

    tables = [measurements.measure_demo(folder), measurements.measure_large(folder)]
    for table in tables:
        table.show()
    print(measurements.write_page(tables))


@app.command()
def render() -> None:
    """Write the tables of docs/performance.md from docs/performance.json once more."""
    from benchmarks import results_file

    results_file.document().write_text(
        results_file.rendered(results_file.document().read_text("utf-8"), results_file.read()), encoding="utf-8"
    )


@app.command()
def peers(install: Annotated[bool, typer.Option("--install", help="Make their environment.")] = False) -> None:
    """The peers' environment: what is in it, or its making."""
    from benchmarks import peers

    if install:
        peers.install()
    installed = peers.versions()
    print(
        f"{peers.folder()}: " + (", ".join(f"{name} {number}" for name, number in installed.items()) or "nothing yet")
    )


def _section(name: str, rounds: int, warm_up: int, json_file: Path | None, only: str) -> None:
    from benchmarks import report, results_file

    results = _measured(name, rounds, warm_up, only)
    for table in report.SECTIONS[name](results):
        table.show()
    if json_file:
        contents = {"about": results_file.about(rounds, warm_up), "results": results}
        json_file.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _measured(name: str, rounds: int, warm_up: int, only: str) -> list[dict[str, Any]]:
    from benchmarks import sections

    try:
        return sections.measure(name, rounds, warm_up, only)
    except LookupError as missing:
        raise typer.BadParameter(str(missing)) from missing


if __name__ == "__main__":
    app()
