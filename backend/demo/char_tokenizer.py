"""A tokenizer with one token per character, for sums only, saved in the files that transformers and mlx-lm load.

Characters without a token become `<unk>`. The four answer tags are single tokens but not special tokens: completions are
decoded without special tokens, and the reward functions look for the tags.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, UNKNOWN, START, END)
WORDS = ("<think>", "</think>", "<answer>", "</answer>", "system", "user", "assistant")
CHARACTERS = tuple("\n 0123456789+=,")
VOCABULARY = SPECIAL + WORDS + CHARACTERS
"""Every token; its index is its id."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)


SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": UNKNOWN,
    "pad_token": PAD,
    "eos_token": END,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 512,
}
"""tokenizer_config.json."""


def make() -> PreTrainedTokenizerFast:
    """The tokenizer, equal to what transformers loads from the files that `save` writes."""
    # Byte-pair encoding without merges: one token per character, and `<unk>` for every other one.
    characters = BPE({token: index for index, token in enumerate(VOCABULARY)}, [], unk_token=UNKNOWN)
    tokenizer = Tokenizer(characters)
    tokenizer.decoder = decoders.Fuse()  # the default joins tokens with spaces
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SETTINGS)


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Not with `save_pretrained`: which files it writes, and what is in
    them, changes with the version of transformers."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS, indent=2) + "\n", encoding="utf-8")
