"""Real text that every machine has: Python's own library and the licences beside it. And a byte-level BPE tokenizer trained on it."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
_LICENCES = Path("/usr/share/common-licenses")
_BYTES = 3_000_000


def corpus() -> list[str]:
    """Texts in a fixed order, about 3 MB: top-level modules of Python's library, its licence, and the system's licences if there are any."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py")) + sorted((library / "asyncio").glob("*.py")) + [library / "LICENSE.txt"]
    licences = sorted(p for p in _LICENCES.iterdir() if p.is_file() and not p.is_symlink()) if _LICENCES.is_dir() else []
    texts, size = [], 0
    for file in [*licences, *files]:
        if not file.is_file() or size > _BYTES:
            continue
        texts.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1])
    if size < 100_000:
        raise ValueError(f"{library}: only {size} characters of Python sources found to train a tokenizer on; use --model with a checkpoint of your own")
    return texts


def corpus_key(texts: Sequence[str]) -> str:
    """16 hex digits over the texts."""
    hashed = hashlib.sha256()
    for text in texts:
        hashed.update(f"{len(text)}\n{text}".encode())
    return hashed.hexdigest()[:16]


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab`` tokens; the same texts give the same tokenizer.

    Raises:
        ValueError: the texts are too short for that many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, {vocab} were asked for")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Write the two files that transformers and vLLM read; returns their paths."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": 1 << 20}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> npt.NDArray[np.int32]:
    """All texts as one stream of tokens, each followed by the end token."""
    end = tokenizer.token_to_id(END)
    stream: list[int] = []
    for encoded in tokenizer.encode_batch(list(texts)):
        stream += [*encoded.ids, end]
    return np.array(stream, dtype=np.int32)
