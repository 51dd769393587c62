"""Over which machines a run is spread, and what happens when one of them is lost."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import MACHINES


class DistributedFields(BaseModel):
    """Over which machines a run is spread: the fields of `backend.config.config.Config` about it. None of them changes what a run learns,
    so a resumed run may have others (`backend.runs.changeable`)."""

    # fmt: off
    hosts: str = setting("", "training", "Hosts file", "A hosts file of mlx.launch: one entry for each rank, the first of them on this machine. "
                         "Each step is then sampled and learned on all of them. Empty trains on this machine alone.",
                         kind="hosts", group=MACHINES, advanced=True, used_by=("duration",))
    distributed_backend: str = setting(
        "auto", "training", "Connection", "How the machines exchange gradients.",
        choices=[("auto", "Automatic", "JACCL where the hosts file names RDMA devices, else the ring for two ranks and MPI for more; NCCL on CUDA."),
                 ("ring", "Ring", "Over TCP. With three ranks or more its sums can stall; the run then ends and can be resumed."),
                 ("mpi", "MPI", "Over TCP, by Open MPI, which must be installed on every machine."),
                 ("jaccl", "JACCL", "RDMA over Thunderbolt 5, macOS 26.2 or later."),
                 ("nccl", "NCCL", "Between CUDA GPUs.")],
        group=MACHINES, advanced=True,
    )
    on_lost_rank: str = setting(
        "stop", "training", "When a machine is lost", "What to do when a machine stops answering, or its process dies.",
        choices=[("stop", "Save and end", "The last finished step is saved; resume the run when the machine is back, or without it."),
                 ("go_on", "Go on without it", "The run is started again on the others, from its last finished step.")],
        group=MACHINES, advanced=True,
    )
    parallelism: str = setting(
        "data", "training", "Parallelism", "What is divided among the machines.",
        choices=[("data", "Prompts", "Every machine has the whole model and takes a part of each step's prompts. The fastest."),
                 ("tensor", "Tensors", "Every layer is divided, for a model too large for one machine. LoRA only; needs a fast connection."),
                 ("pipeline", "Layers", "Every machine has some of the layers. Cannot be trained: mlx passes no gradient from one to the next.")],
        group=MACHINES, advanced=True,
    )
    # fmt: on
