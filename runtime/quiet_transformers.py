"""transformers without its bars and reports, where what is wrong becomes one line of ours."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bar and no report within; settings are as before afterwards."""
    shows_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with _without_gguf_bar():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


@contextmanager
def _without_gguf_bar() -> Iterator[None]:
    """The bar over a GGUF file's tensors is tqdm's own, which no setting of transformers turns off."""
    try:
        module: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        bar = module.tqdm
    except (ImportError, AttributeError):  # another version has it elsewhere: it shows then
        yield
        return
    module.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar
