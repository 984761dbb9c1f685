"""The model's tokenizer: read from its folder, and told apart from others."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazysched.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lazysched.runtime.sources import ModelSource


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer beside the model's configuration, with the loose types of transformers.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    folder = source.config_dir
    if not source.has_tokenizer:
        raise UsageError(f"model: {folder} has no tokenizer; put the tokenizer's files beside config.json")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises plain Exception for a file that it cannot read
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{folder}: its tokenizer cannot be read ({reason}); download its files again") from None


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of all that the tokenizer would be saved as, its chat template too, and of its class."""
    digest = hashlib.sha256(type(tokenizer).__qualname__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(folder)}\n{path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()
