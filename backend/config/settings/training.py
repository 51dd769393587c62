"""Length of the run, optimizer, evaluation, and use of the machine."""

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel

from backend.config.setting import MOST_COMPLETIONS, MOST_STEPS, MOST_TOKENS, NEVER, setting
from backend.config.updates import DEFAULT_FINAL, OWN
from backend.runs.metric_names import our_name, with_our_name

_steps = partial(setting, section="training", group="Steps and batches")
_advanced_steps = partial(_steps, advanced=True)
_memory = partial(setting, section="training", group="Memory, test and fusing")
_advanced_memory = partial(_memory, advanced=True)
_learning = partial(setting, section="training", group="Learning rate and optimizer")
_advanced_learning = partial(_learning, advanced=True)
_supervised = partial(setting, section="training", group="Supervised learning", advanced=True)
_WARMED = ("train_mode", ("grpo", "distill"))
_reports = partial(setting, section="training", group="Evaluation and checkpoints")
_advanced_reports = partial(_reports, advanced=True)
_best = partial(setting, section="training", group="Early stopping", advanced=True)
_machines = partial(setting, section="training", group="Machines", advanced=True)
_ADAPTERS = ("train_type", ("lora", "dora"))
_ADAM = ("optimizer", ("adam", "adamw", "adamax", "lion"))
EIGHT_BIT = ("adamw", "adam", "lion", "muon")
"""Optimizers with an 8-bit state."""
_FALLING = ("cosine", "linear", "cosine_with_restarts", "polynomial", "exponential", "step", "warmup_stable_decay")
_FALLS = ("lr_schedule", _FALLING)
_RISES = ("lr_schedule", ("constant_with_warmup", *_FALLING, "inverse_sqrt"))


class TrainingFields(BaseModel):
    """Length of the run, optimizer, evaluation, and use of the machine."""

    iters: int = _steps(1000, "Iterations", within=(1, MOST_STEPS, "steps"))
    """Training steps. Each samples one group per prompt of the batch and learns from it."""
    epochs: int = _steps(0, "Epochs", within=(0, 1_000_000, "passes"))
    """Passes over the dataset. Above 0 they set the length of the run instead of Iterations."""
    batch_size: int = _steps(1, "Batch", within=(1, MOST_COMPLETIONS, "prompts"))
    """Prompts per step, before gradient accumulation."""
    gradient_accumulation_steps: int = _memory(1, "Gradient accumulation", within=(1, MOST_COMPLETIONS, "batches"))
    """Multiplies the prompts of a step. Gradients are summed batch by batch, so memory stays the same."""
    num_iterations: int = _steps(
        1, "Updates per rollout", within=(1, 10_000, "updates"), when=_WARMED, used_by=("duration",)
    )
    """Weight updates per batch of completions (μ). At 1 the ratio is always 1: Epsilon and Importance have no effect
    and the clip chart stays at 0."""
    steps_per_generation: int = _advanced_steps(1, "Batches per rollout", within=(1, 10_000, "batches"), when=_WARMED)
    """Optimizer batches sampled at once. Above 1, later batches learn from completions of a slightly older policy."""
    max_seq_length: int = _steps(
        2048, "Max Seq", within=(2, MOST_TOKENS, "tokens"), used_by=("prompt_limit", "scoring")
    )
    """Prompt plus completion. Rows whose prompt leaves no room for the completion are skipped and counted."""
    seed: int = _steps(0, "Seed", within=(0, 2**32 - 1), used_by=("rows",))
    """The same seed on the same machine gives the same run."""
    data_seed: int | None = _advanced_steps(None, "Data seed", within=(0, 2**32 - 1), used_by=("rows",))
    """Seed of the prompt order and of the held-out rows. Empty: Seed."""
    learning_rate: float = _learning(1e-5, "Learning Rate", above=(0, 10))
    """Size of each update. LoRA needs roughly ten times the rate of full fine-tuning."""
    optimizer: str = _learning(
        "adamw",
        "Optimizer",
        ("adamw", "AdamW", "Adam with weight decay apart from the gradient: the usual choice."),
        ("adam", "Adam", ""),
        ("muon", "Muon", "Orthogonalised momentum for matrices."),
        ("sgd", "SGD", ""),
        ("lion", "Lion", "Sign of the momentum; wants a smaller learning rate."),
        ("adafactor", "Adafactor", "Little memory."),
        ("rmsprop", "RMSprop", ""),
        ("adagrad", "Adagrad", ""),
        ("adadelta", "AdaDelta", ""),
        ("adamax", "Adamax", ""),
        (OWN, "Of a program", "An optimizer that a program passes to backend.train.", True),
    )
    """Turns gradients into updates."""
    own_optimizer: str = _advanced_learning("", "Optimizer of the program", when=("optimizer", (OWN,)))
    """Class and numbers of the optimizer object that a program passed to backend.train."""
    optimizer_bits: str = _advanced_learning(
        "32",
        "Optimizer state",
        ("32", "32-bit", "Exact. AdamW remembers twice the size of the weights that learn."),
        ("8", "8-bit", "A quarter of the memory, rounded per block. Matters under full fine-tuning."),
        when=("optimizer", EIGHT_BIT),
    )
    """Precision of the optimizer's state."""
    weight_decay: float = _advanced_learning(
        0.01, "Weight decay", within=(0, 1), when=("optimizer", ("adamw", "muon", "sgd", "lion", "adafactor"))
    )
    """Pulls weights towards zero at each update."""
    adam_beta1: float = _advanced_learning(0.9, "Beta 1", below=(0, 1), when=_ADAM)
    """Decay of the mean gradient."""
    adam_beta2: float = _advanced_learning(0.999, "Beta 2", below=(0, 1), when=_ADAM)
    """Decay of the mean squared gradient."""
    adam_epsilon: float = _advanced_learning(
        1e-8, "Adam epsilon", above=(0, 1), when=("optimizer", ("adam", "adamw", "adamax"))
    )
    """Added to the root of the mean squared gradient. Larger damps updates of weights with tiny gradients."""
    max_grad_norm: float = _advanced_learning(1.0, "Max gradient norm", within=(0, 1_000_000))
    """Clips the gradient to this norm. 0: off."""
    neftune_noise_alpha: float = _advanced_learning(0.0, "NEFTune noise", within=(0, 1_000), used_by=("duration",))
    """Uniform noise on the input embeddings while learning (arXiv:2310.05914). Slower, since prompts are read once
    per completion. 5 to 15 is usual; 0: off."""
    lr_schedule: str = _learning(
        "constant",
        "LR Schedule",
        ("constant", "Constant", "The same rate throughout; warms up only with a warm-up ratio."),
        ("constant_with_warmup", "Constant with warm-up", "Warms up, then stays."),
        ("cosine", "Cosine decay", "Warms up, then falls along a cosine to the final rate."),
        ("linear", "Linear", "Warms up, then falls along a line to the final rate."),
        ("cosine_with_restarts", "Cosine with restarts", "Several cosines, each from the full rate."),
        ("polynomial", "Polynomial", "As Linear, raised to a power."),
        ("exponential", "Exponential", "Falls by the same factor at every update."),
        ("step", "Step", "Falls by equal factors at equal distances."),
        ("inverse_sqrt", "Inverse square root", "Falls as one over the root of the updates."),
        ("warmup_stable_decay", "Warm-up, stable, decay", "Warms up, stays, then falls along a cosine."),
        (OWN, "Of a program", "A function of the update that a program passes to backend.train.", True),
    )
    """How the learning rate changes over the run."""
    own_schedule: str = _advanced_learning("", "Schedule of the program", when=("lr_schedule", (OWN,)))
    """Name and rates of the schedule that a program passed to backend.train. Learning Rate has no effect then."""
    lr_warmup_steps: int = _learning(40, "Warm-up", within=(0, NEVER, "updates"), when=_RISES)
    """Updates until the rate reaches its peak."""
    lr_warmup_ratio: float | None = _advanced_learning(None, "Warm-up ratio", within=(0, 1))
    """Warm-up as a share of the run's updates, under every schedule. Empty: Warm-up counts."""
    lr_warmup_init: float = _learning(1e-7, "Warm-up start", within=(0, 10), when=_RISES)
    """The rate of the first update."""
    lr_decay_fraction: float = _learning(0.8, "Decay fraction", above=(0, 10), when=_FALLS)
    """Share of the run over which the rate falls, counted from the end of the warm-up (in Warm-up, stable, decay:
    from the end of the run). Above 1 the run ends before the final rate."""
    lr_final: float | None = _learning(DEFAULT_FINAL, "Final rate", within=(0, 10), when=_FALLS)
    """Rate at the end of the decay. Empty, or the default above the learning rate: a fifth of the learning rate."""
    lr_cycles: int = _advanced_learning(
        1, "Schedule cycles", within=(1, 1_000_000), when=("lr_schedule", ("cosine_with_restarts", "step"))
    )
    """Number of cosine cycles, or of steps down."""
    lr_power: float = _advanced_learning(1.0, "Schedule power", above=(0, 100), when=("lr_schedule", ("polynomial",)))
    """1 is a line; above 1 falls early, below 1 late."""
    sft_targets: str = _supervised(
        "dataset",
        "Imitates",
        ("dataset", "Dataset", "The completion or messages of each row."),
        ("best_of_n", "Best of its own", "The best of Group sampled completions, where it beats their mean."),
        used_by=("row_view",),
    )
    """What supervised steps learn to write: the dataset's answers, or the model's own best ones (rejection sampling),
    which needs reward functions and no labelled rows."""
    warmup_steps: int = _supervised(
        0, "Supervised warm-up", within=(0, MOST_STEPS, "steps"), when=_WARMED, used_by=("row_view",)
    )
    """The first steps of Iterations are supervised, for a model that never earns a reward by itself. Then the run's own
    mode starts with a new optimizer, and the KL penalty keeps it near the warmed-up model."""
    warmup_learning_rate: float | None = _supervised(None, "Warm-up rate", above=(0, 10), when=_WARMED)
    """Constant rate of the supervised warm-up. Empty: Learning Rate."""
    warmup_pass_rate: float = _supervised(0.0, "Warm-up goal", within=(0, 1), when=_WARMED)
    """Ends the warm-up once this share of the step's prompts is solved by one of Group sampled completions. Measured in
    every tenth step, which then costs a rollout. 0: off."""
    steps_per_report: int = _reports(10, "Report", within=(1, NEVER, "steps"))
    """How often the terminal prints a line. Charts have a point for every step (in MLX LoRA Studio: per report)."""
    steps_per_eval: int = _reports(200, "Eval", within=(-1, NEVER, "steps"))
    """How often held-out prompts are answered and scored. 0: never; −1: once per epoch."""
    eval_delay: int = _advanced_reports(0, "Eval delay", within=(0, NEVER, "steps"))
    """No evaluation before this step, except before training."""
    eval_batch_size: int | None = _advanced_reports(None, "Eval batch", within=(1, MOST_COMPLETIONS, "prompts"))
    """Held-out prompts answered together; Val Batches and Test Batches count these. Empty: as many as in a step."""
    save_every: int = _reports(100, "Save", within=(-1, NEVER, "steps"))
    """How often a checkpoint is written. −1: once per epoch."""
    stop_when: list[Annotated[str, AfterValidator(with_our_name)]] = _best([], "Stop when")
    """Finishes the run when a condition such as kl > 0.8 or eval/reward >= 2.5 holds. Step metrics are averaged over
    five steps."""
    save_only_model: bool = _advanced_reports(False, "Save weights only")
    """Saves checkpoints without optimizer state: a third of the size with Adam, but a resumed run starts with a
    fresh optimizer."""
    best_metric: Annotated[str, AfterValidator(our_name)] = _best("", "Best metric")
    """Metric of the best checkpoint and of Early stopping: eval/… of held-out prompts, or a step metric averaged
    between checkpoints. Empty: the reward, held-out where the run evaluates."""
    best_is_lowest: bool = _best(False, "Lower is better")
    """A lower Best metric is better, as for a loss or a length."""
    load_best_at_end: bool = _best(False, "End with the best")
    """Uses the best checkpoint, not the last step, for the final adapters, model and test."""
    early_stopping_patience: int = _best(0, "Early stopping", within=(0, NEVER, "evaluations"))
    """Finishes the run after this many evaluations without a better score (without evaluations: checkpoints). 0:
    never."""
    early_stopping_min_delta: float = _best(0.0, "Least gain", within=(0, 1_000_000))
    """Smallest gain that counts for Early stopping."""
    keep_checkpoints: int = _advanced_reports(3, "Keep checkpoints", within=(1, NEVER, "checkpoints"))
    """Newest checkpoints kept on disk, besides the best one."""
    val_batches: int = _reports(25, "Val Batches", within=(-1, NEVER, "batches"))
    """Batches of held-out prompts per evaluation. −1: all. 0: no evaluation."""
    test: bool = _memory(False, "Evaluate test split")
    """Evaluates the test split when training ends."""
    test_batches: int = _memory(
        100, "Test Batches", within=(-1, NEVER, "batches"), when=("test", (True,)), stays_visible=True
    )
    """Batches of test prompts. −1: all."""
    grad_checkpoint: bool = _memory(False, "Gradient checkpointing", used_by=("duration",))
    """Recomputes each layer in the backward pass: less memory, about a third slower."""
    device: str = _advanced_memory(
        "auto",
        "Device",
        ("auto", "Automatic", "The GPU where MLX has one, else the CPU."),
        ("gpu", "GPU", "Refused where MLX has none."),
        ("cpu", "CPU", "Much slower on a Mac; leaves its GPU free."),
        used_by=("duration",),
    )
    """Where the run computes."""
    memory_limit: float = _advanced_memory(0.0, "Memory limit", within=(0, 1_000_000, "GB"))
    """Memory the run may use; sampling and learning are split to stay within it. 0: a safe share of this machine."""
    retry_on_gpu_error: int = _advanced_memory(3, "Retries after a GPU error", within=(0, 1_000, "times"))
    """Restarts in a row after a GPU error, each with half the micro-batch. 0: never."""
    relax_gpu_timeout: bool = _advanced_memory(False, "Relax GPU timeout")
    """Asks macOS to wait longer before it stops GPU work for the display (AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1).
    Undocumented by Apple; the display may stutter."""
    efficient_long_context: bool = _advanced_memory(False, "Efficient long context")
    """Reads long prompts and computes log-probabilities in pieces of Sequence step size."""
    seq_step_size: int = _memory(
        512,
        "Sequence step size",
        within=(16, MOST_TOKENS, "tokens"),
        when=("efficient_long_context", (True,)),
        stays_visible=True,
    )
    """Tokens per piece."""
    record_tokens: bool = _advanced_reports(False, "Record tokens")
    """Records log-probability, ratio and clipping of every token, for the colours of the Completions page.
    completions.jsonl grows about fivefold."""
    mask_prompt: bool = _memory(
        True,
        "Mask prompt",
        note="For supervised fine-tuning: GRPO never trains on the prompt.",
        known_as=("Mask prompt loss",),
        used_by=("row_view",),
    )
    """Supervised fine-tuning learns only what the assistant says. Off: the prompts too, as mlx-lm does unless told
    otherwise. GRPO never trains on the prompt."""
    fuse: bool = _memory(True, "Fuse", when=_ADAPTERS, known_as=("Fuse merged model after training",))
    """Merges the adapters into a complete model in the run folder at the end."""
    hosts: str = _machines("", "Hosts file", kind="hosts", used_by=("duration",))
    """A hosts file of mlx.launch, one entry per rank, this machine first. Empty: train on this machine only."""
    distributed_backend: str = _machines(
        "auto",
        "Connection",
        ("auto", "Automatic", "JACCL for RDMA devices, NCCL on CUDA, the ring for two ranks, MPI for more."),
        ("ring", "Ring", "Over TCP. With three or more ranks it can stall; the run then ends and can be resumed."),
        ("mpi", "MPI", "Over TCP, with Open MPI installed on every machine."),
        ("jaccl", "JACCL", "RDMA over Thunderbolt 5, macOS 26.2 or later."),
        ("nccl", "NCCL", "Between CUDA GPUs."),
    )
    """How the machines exchange gradients."""
    on_lost_rank: str = _machines(
        "stop",
        "When a machine is lost",
        ("stop", "Save and end", "Saves the last finished step; resume with or without the machine."),
        ("go_on", "Go on without it", "Restarts on the other machines from the last finished step."),
    )
    """What to do when a machine or its process stops answering."""
    parallelism: str = _machines(
        "data",
        "Parallelism",
        ("data", "Prompts", "Every machine has the whole model and takes some of the prompts. The fastest."),
        ("tensor", "Tensors", "Splits each layer, for a model too large for one machine. LoRA, fast links only."),
        ("pipeline", "Layers", "Splits the layers among machines. Cannot be trained with mlx.", True),
    )
    """What is divided among the machines."""
