"""What cannot be trained while a model is divided among several machines, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from backend.spec.faults import Fault


def division_faults(
    parallelism: str,
    train_type: str,
    dropout: float,
    modules_to_save: list[str],
    reference_model_path: str,
    sync_ref_model: bool,
) -> Iterator[Fault]:
    """The faults of these settings under `parallelism`."""
    if parallelism == "pipeline":
        yield Fault(
            "parallelism",
            "Layers: what one machine sends to the next has no gradient in mlx, so a model divided so cannot be trained; choose Tensors.",
        )
    if parallelism != "tensor":
        return
    if train_type != "lora":
        reason = (
            "the norms of whole rows"
            if train_type == "dora"
            else "every weight with its optimizer state on one machine"
        )
        yield Fault("train_type", f"Divided among machines a model is trained with LoRA; {train_type} needs {reason}.")
    if dropout:
        yield Fault(
            "dropout", "Each machine would drop inputs of its own; set Dropout to 0, or Parallelism to Prompts."
        )
    if modules_to_save:
        yield Fault(
            "modules_to_save",
            "Divided among machines a model learns in its adapters alone; leave Modules to save empty.",
        )
    if reference_model_path:
        yield Fault(
            "reference_model_path",
            "Divided among machines the reference is the base model; another one would have to be divided too.",
        )
    if sync_ref_model:
        yield Fault(
            "sync_ref_model", "Divided among machines the reference stays the base model; switch Reference follows off."
        )
