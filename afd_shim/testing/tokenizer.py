"""A byte-level tokenizer of 512 tokens, the same on every machine.

Nothing is trained: the 256 bytes, three special tokens, and merges of the most frequent English
letters, so that any text encodes and most generated tokens decode to something a person can read.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

__all__ = ["EOS_TOKEN", "EOS_TOKEN_ID", "VOCAB_SIZE", "write_tokenizer"]

VOCAB_SIZE = 512
BOS_TOKEN, EOS_TOKEN, PAD_TOKEN = "<s>", "</s>", "<pad>"
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 0, 1, 2

_LETTERS = "Ġetaoinshrdlucmf"  # Ġ is a space in the byte-level alphabet
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, a fast Hugging Face tokenizer.

    Needs the `tokenizers` package, which comes with vLLM.
    """
    # Not at the top: configuration and tensors can be written without it.
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    specials = [BOS_TOKEN, EOS_TOKEN, PAD_TOKEN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A leading space joins a letter, never another space or the end of a word.
    pairs = [(a, b) for a, b in itertools.product(_LETTERS, _LETTERS) if b != "Ġ"]
    pairs += [("Ġ", letter) for letter in "wgypbvkTA" if letter not in _LETTERS]
    merges = pairs[: VOCAB_SIZE - len(specials) - len(alphabet)]
    pieces = [*specials, *alphabet, *(a + b for a, b in merges)]
    pieces += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(pieces))]

    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(directory / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
