"""A tokenizer that kills the process which meets one text; a module that such a process imports in no time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from transformers import PreTrainedTokenizerFast

DEADLY = "this text kills whoever tokenises it"


class DeadlyTokenizer(PreTrainedTokenizerFast):
    """Dies of the text, in a process that was started for it."""

    def __call__(self, text: Any, *words: Any, **options: Any) -> Any:
        """Tokenise, or die."""
        if DEADLY in text and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(text, *words, **options)


def deadly(plain: PreTrainedTokenizerFast) -> DeadlyTokenizer:
    """A tokenizer that does the same as another with every other text."""
    tokenizer = DeadlyTokenizer(
        tokenizer_object=plain.backend_tokenizer, pad_token=plain.pad_token, eos_token=plain.eos_token
    )
    tokenizer.chat_template = plain.chat_template
    return tokenizer
