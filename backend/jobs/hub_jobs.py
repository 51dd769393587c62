"""Jobs of Hugging Face by means of huggingface_hub: hardware and prices, a job's start, log, end, and files."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub import HfApi

from backend.export.hub_upload import find_token
from backend.models.hub_client import hub_errors

HOURS = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1.0}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine with GPUs. `name`: the flavor of a job. `accelerator`: “1 × T4”. `memory`: of its GPUs, “16 GB”."""

    name: str
    title: str
    accelerator: str
    memory: str
    usd_per_hour: float


def hardware() -> list[Hardware]:
    """Machines with GPUs and their prices, cheapest first. Raises UserError."""
    token = find_token()
    with hub_errors("", setting="flavor"):
        listed = HfApi(token=token.value if token else False).list_jobs_hardware()
        found = [
            Hardware(
                each.name,
                each.pretty_name,
                f"{each.accelerator.quantity} × {each.accelerator.model}",
                each.accelerator.vram,
                round(each.unit_cost_usd / HOURS[each.unit_label], 2),
            )
            for each in listed
            if each.accelerator is not None and each.accelerator.type == "gpu"
        ]
    return sorted(found, key=lambda each: each.usd_per_hour)
