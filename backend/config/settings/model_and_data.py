"""The model, its adapters and their precision; how rows become prompts, and where metrics are reported."""

from functools import partial
from typing import Any

from pydantic import BaseModel

from backend.config.setting import MOST_COMPLETIONS, MOST_TOKENS, setting

_algorithm = partial(setting, section="algorithm")
_model_data = partial(setting, section="model_data")
_fine_tune = partial(setting, section="fine_tune")
_lora = partial(setting, section="fine_tune", group="LoRA Settings")
_advanced_lora = partial(_lora, advanced=True)
_weights = partial(setting, section="fine_tune", group="Weights")
_teacher = partial(_model_data, when=("train_mode", ("distill",)))
_ADAPTERS = ("train_type", ("lora", "dora"))
_columns = partial(setting, section="columns", group="Columns", used_by=("task", "row_view"))
_prompts = partial(setting, section="columns", group="Prompts")
_advanced_prompts = partial(_prompts, advanced=True)
_answers = partial(setting, section="columns", group="Answers", advanced=True)
_held_out = partial(setting, section="columns", group="Held-out prompts", advanced=True)
_rows = partial(setting, section="columns", group="Rows and splits", advanced=True, used_by=("task", "rows"))
_output = partial(setting, section="output")
_advanced_output = partial(_output, advanced=True)


class ModelFields(BaseModel):
    """The model, its adapters and their precision."""

    train_mode: str = _algorithm(
        "grpo",
        "Mode",
        ("grpo", "GRPO", "Learns from reward functions, no labelled answers to imitate."),
        ("sft", "SFT", "Imitates the answers of a labelled dataset: supervised fine-tuning, no reward functions."),
        ("distill", "Distillation", "Learns to answer as a larger model does, from its own answers."),
        used_by=("row_view",),
    )
    """GRPO samples a group of answers for each prompt, scores them with your reward functions, and reinforces the
    better ones. SFT learns the answers of the dataset."""
    model: str = _model_data(
        "", "Base model", kind="model", known_as=("Model or Hugging Face repo",), used_by=("task", "row_view")
    )
    """A folder with an MLX or Hugging Face model, or a Hugging Face id such as mlx-community/Qwen3-0.6B-4bit.
    @revision after it names a branch, tag or commit."""
    teacher_model: str = _teacher("", "Teacher model", kind="model", used_by=("task",))
    """The model whose next-token distribution is matched: a folder or a Hugging Face id with the same vocabulary. It is
    loaded beside the base model and does not change."""
    teacher_quantization: str = _teacher(
        "none",
        "Teacher quantization",
        ("none", "None", "As the teacher comes."),
        ("4", "4-bit", "A quarter of 16-bit memory; some loss."),
        ("8", "8-bit", "Half of 16-bit memory; hardly any loss."),
    )
    """Stores the teacher's weights in fewer bits."""
    adapter: str = _model_data("", "Adapter", kind="adapter", used_by=("task",))
    """LoRA or DoRA adapters to start from: a folder or file in mlx-lm's format, or a run (name, name@best,
    name@100). They set Rank, Scale and the layers. Empty: start from the base model."""
    data: str = _model_data(
        "", "Dataset", kind="dataset", known_as=("Dataset path or local data folder",), used_by=("task", "rows")
    )
    """A jsonl, json, csv or parquet file, a folder with train, valid and test files, or a Hugging Face id (also with
    @revision)."""
    lm_studio_name: str = _model_data("", "LM Studio export name", used_by=("task",))
    """Copies the finished model into LM Studio's models folder under this name. Needs Fuse."""
    train_type: str = _fine_tune(
        "lora",
        "Fine-tune",
        ("lora", "LoRA", "Small matrices beside the frozen weights: little memory, the usual choice."),
        ("dora", "DoRA", "LoRA that learns the length of weight rows separately: slower, often better."),
        ("full", "Full", "Every weight. Several times the memory; the model must not be quantised."),
        used_by=("duration",),
    )
    """Which weights change."""
    num_layers: int = _lora(16, "Layers", within=(-1, 10_000, "layers"), when=_ADAPTERS, used_by=("duration",))
    """Number of last layers that get adapters. −1: all."""
    rank: int = _lora(8, "Rank", within=(1, 4_096), when=_ADAPTERS)
    """Width of the adapter matrices. Larger learns more and needs more memory."""
    scale: float = _lora(20.0, "Scale", above=(0, 1_000_000), when=_ADAPTERS)
    """Factor on the adapter's output."""
    lora_alpha: float | None = _advanced_lora(None, "LoRA alpha", above=(0, 1_000_000), when=_ADAPTERS)
    """Scale as PEFT and TRL write it: alpha divided by the rank. Replaces Scale."""
    use_rslora: bool = _advanced_lora(False, "rsLoRA", when=_ADAPTERS)
    """Divides LoRA alpha by the root of the rank, so large ranks learn as fast as small ones (arXiv:2312.03732)."""
    dropout: float = _lora(0.0, "Dropout", below=(0, 1), when=_ADAPTERS)
    """Share of adapter inputs set to zero while learning."""
    lora_keys: list[str] = _advanced_lora([], "Target modules", when=_ADAPTERS)
    """Layers that get adapters, by full name or ending: self_attn.q_proj, q_proj, or all-linear. Empty: every layer
    that can."""
    modules_to_save: list[str] = _advanced_lora([], "Modules to save", when=_ADAPTERS)
    """Modules trained in full beside the adapters, by name or ending: lm_head, embed_tokens, norm. mlx-lm does not
    load them with the adapters; the fused model has them."""
    quantization: str = _weights(
        "none",
        "Quantization",
        ("none", "None", "As the model comes."),
        ("4", "4-bit", "A quarter of 16-bit memory; some loss."),
        ("6", "6-bit", ""),
        ("8", "8-bit", "Half of 16-bit memory; hardly any loss."),
        ("mxfp4", "MXFP4", "4-bit floating point with shared exponents."),
    )
    """Stores the frozen base weights in fewer bits. Quantisation-aware training (QAT) does not apply to GRPO."""
    dtype: str = _weights(
        "auto",
        "Precision",
        ("auto", "Automatic", "As the model comes; 32 bits under full fine-tuning, and on a CPU with the memory."),
        ("float32", "float32", "Sampling and learning agree exactly. Twice the memory of 16 bits."),
        ("bfloat16", "bfloat16", "As most models come: a wide range. Full fine-tuning adds 32-bit weights."),
        ("float16", "float16", "Eight times finer than bfloat16, with a smaller range."),
    )
    """Floating-point type of the computation. Saved weights keep the model's own precision. On a CPU float32 expands
    quantised weights to the same values."""


class DataFields(BaseModel):
    """How rows become prompts, and where metrics are reported."""

    prompt_feature: str = _columns("prompt", "Prompt", used_by=("task", "row_view"))
    """Column with the question: text, or a list of chat messages."""
    answer_feature: str = _columns("answer", "Answer", part="scoring")
    """Column with the right answer, for rewards that compare."""
    type_feature: str = _columns("type", "Type", part="scoring")
    """Optional column that reward functions may read."""
    completion_feature: str = _columns("completion", "Completion column", advanced=True)
    """Column with the answer that SFT and the warm-up imitate: text, or a list of chat messages."""
    messages_feature: str = _columns("messages", "Messages", advanced=True)
    """Column with whole chats, for rows without a completion: every turn of the assistant is imitated."""
    system_feature: str = _columns("system", "System", used_by=("task", "row_view"))
    """Optional column with a system message per row."""
    system_prompt: str = _prompts("", "System prompt", kind="prose", used_by=("row_view",))
    """Used for rows without their own system message."""
    prompt_template: str = _advanced_prompts("", "Prompt template", kind="prose", used_by=("task", "rows"))
    """Text of each prompt; {question} inserts that column, {{ and }} are braces. Empty: the prompt column."""
    answer_pattern: str = _answers("", "Answer pattern", used_by=("task", "rows"))
    """A regular expression with one group that extracts the answer from the answer column, such as #### (.*). Rows
    without a match are skipped and counted."""
    map_function: str = _answers("", "Map function", used_by=("task", "rows"))
    """A function registered with @register_map_function. It gets each row and returns the row to train on, or None
    to skip it."""
    valid_data: str = _held_out("", "Validation dataset", kind="dataset", used_by=("task", "rows"))
    """A file, folder or Hugging Face id to evaluate on, instead of the dataset's valid split."""
    test_data: str = _held_out("", "Test dataset", kind="dataset", used_by=("task", "rows"))
    """A file, folder or Hugging Face id for the final test, instead of the dataset's test split."""
    eval_data: dict[str, Any] = _held_out({}, "Evaluation sets", used_by=("task", "rows"))
    """More datasets to evaluate on, by name: gsm8k: openai/gsm8k, or a mapping with data and what differs, such as
    answer_pattern."""
    streaming: bool = _rows(False, "Streaming")
    """Reads rows from disk when they are needed, for datasets larger than memory. Needs jsonl, csv, parquet or
    Hugging Face."""
    dataset_config: str = _rows("", "Dataset config")
    """Configuration of a Hugging Face dataset."""
    train_split: str = _rows("train", "Train split")
    """Split to train on."""
    valid_split: str = _rows("valid", "Valid split")
    """Split for evaluations; “validation” works too."""
    test_split: str = _rows("test", "Test split")
    """Split for the test at the end."""
    validation_split: float = _rows(0.0, "Validation share", below=(0, 1), used_by=("rows",))
    """Share of the training rows held out if there is no valid split."""
    chat_template_kwargs: dict[str, Any] = _advanced_prompts({}, "Chat template options", used_by=("row_view",))
    """Passed to the tokenizer's chat template, such as enable_thinking: false."""
    image_max_pixels: int = _advanced_prompts(
        401_408, "Image pixels", within=(1024, 100_000_000, "pixels"), used_by=("row_view",)
    )
    """Larger images are scaled down to this. For models with a variable image size, such as Qwen-VL; others use their
    own."""
    max_prompt_length: int | None = _advanced_prompts(
        None, "Max prompt", within=(1, MOST_TOKENS, "tokens"), used_by=("prompt_limit",)
    )
    """Maximum prompt tokens. Empty: whatever Max Seq leaves."""
    long_prompts: str = _advanced_prompts(
        "leave_out",
        "Long prompts",
        ("leave_out", "Leave out", "The row is skipped and counted."),
        ("cut_left", "Cut on the left", "Cuts the beginning of the last user message until the prompt fits."),
        used_by=("row_view",),
    )
    """What to do with a row whose prompt is too long."""
    tokenizer: str = _advanced_prompts("", "Tokenizer", kind="model", used_by=("task", "row_view"))
    """A folder or Hugging Face id whose tokenizer and chat template replace the model's own."""
    stop: list[str] = _answers([], "Stop strings")
    """A completion ends when it contains one of these."""
    num_generations_eval: int | None = _held_out(None, "Group in evaluation", within=(1, MOST_COMPLETIONS))
    """Completions per held-out prompt. Empty: as Group."""
    run_name: str = _output("", "Run folder name", used_by=("task",))
    """Empty: named after model, fine-tuning and date."""
    report_to: list[str] = _advanced_output([], "Report to")
    """Trackers: csv, tensorboard, trackio, wandb, none, or all that are installed. wandb stays offline unless
    WANDB_MODE is online."""
    tracker_project: str = _advanced_output("", "Tracker project")
    """Project in trackio and wandb. Empty: grpo-studio."""
    tracker_run_name: str = _advanced_output("", "Tracker run name")
    """Name of the run in trackers. Empty: its folder name."""
