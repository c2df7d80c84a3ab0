"""The `deepspec data` jobs: prompts in, answers out, and a look at what a draft will learn from."""

from __future__ import annotations

from pathlib import Path

from deepspec import console
from deepspec.config import DataConfig, DataJobConfig
from deepspec.data.features import FeatureMemory
from deepspec.data.inspect import render_sample
from deepspec.data.prompts import Conversation, read_conversations
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.data.samples import read_token_samples
from deepspec.data.synthetic import synthetic_prompts
from deepspec.decoding.sampling import Sampling, check_sampling
from deepspec.errors import ConfigError, DataError
from deepspec.files import write_jsonl
from deepspec.runtime import choose_device
from deepspec.targets.base import Target

_BUILT_IN_COUNT = 1500


def load_prompts(config: DataJobConfig) -> list[Conversation]:
    """The job's prompts: those of its file, or the built-in ones where no file is named."""
    if config.prompts is None:
        return synthetic_prompts("train", config.limit or _BUILT_IN_COUNT, config.seed)
    conversations, skipped = read_conversations(config.prompts, config.on_bad_row)
    for reason, count in skipped.items():
        console.info(f"{config.prompts}: {count:,} left out ({reason})")
    return conversations if config.limit is None else conversations[: config.limit]


def write_prompts(config: DataJobConfig) -> Path:
    """Check the prompts and write them, `prompts.jsonl` in the output folder.

    Raises:
        DataError: a prompt is broken and may not be skipped, or the folder cannot be written.
    """
    conversations = load_prompts(config)
    path = Path(config.output_dir) / "prompts.jsonl"
    if config.prompts is not None and path.resolve() == Path(config.prompts).resolve():
        raise DataError(f"{path} would be written over the prompts themselves. Choose another output_dir.")
    try:
        write_jsonl(path, map(_prompt_row, conversations))
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Choose another output_dir.") from error
    console.info(f"{len(conversations):,} prompts: {path}")
    return path


def _prompt_row(conversation: Conversation) -> dict[str, object]:
    """A row that `read_conversations` reads back as the same conversation."""
    row: dict[str, object] = {"id": conversation.id, "domain": conversation.domain}
    turns = conversation.turns
    # User turns in a row are no conversation: the target answers each before it sees the next.
    if len(turns) > 1 and all(turn.role == "user" for turn in turns):
        return {**row, "turns": [turn.content for turn in turns]}
    messages = [
        {"role": turn.role, "content": turn.content}
        | ({} if turn.reasoning is None else {"reasoning_content": turn.reasoning})
        for turn in turns
    ]
    return {**row, "conversations": messages}


def write_answers(config: DataJobConfig, memory: FeatureMemory | None = None) -> Path:
    """Let the target answer the prompts; a rerun continues by id.

    Args:
        config: the job.
        memory: keeps the target's states for a training in the same process.
    """
    path = Path(config.answers)
    if path.suffix != ".jsonl":
        raise ConfigError(f"answers {path}: answers are written as JSONL, and read by that name. End it in .jsonl.")
    if config.prompts is not None and path.resolve() == Path(config.prompts).resolve():
        raise ConfigError(f"answers {path} is the file of prompts. Choose another file for the answers.")
    sampling = check_sampling(Sampling(**config.sampling.model_dump()))
    conversations = load_prompts(config)
    target = Target.load(config.target, choose_device(config.device))
    settings = AnswerSettings(sampling, config.max_new_tokens, config.seed, config.batch_size)
    count = answer_prompts(target, config.target, conversations, settings, path, memory)
    console.info(f"{count:,} answered prompts: {path}")
    return path


def show_samples(config: DataJobConfig) -> None:
    """Print the first samples of an answers file with the supervised tokens coloured, and counts over the file.

    Raises:
        DataError: there is no such file, or it holds broken rows that may not be skipped.
    """
    if not Path(config.answers).exists():
        raise DataError(
            f"{config.answers} does not exist. Make it with `deepspec data answers answers={config.answers}`."
        )
    data = DataConfig(
        answers=config.answers,
        max_length=2**20,
        num_anchors=1,
        min_answer_tokens=1,
        bucket_steps=1,
        on_bad_row=config.on_bad_row,
        allow_other_target=True,
    )
    tokenizer = Target.load_tokenizer(config.target)
    samples, counts = read_token_samples(
        Path(config.answers),
        tokenizer,
        data,
        enable_thinking=config.target.enable_thinking,
        system_prompt=config.target.system_prompt,
    )
    for sample in samples[: config.samples]:
        console.text(render_sample(tokenizer, sample))
    tokens = sum(len(sample.input_ids) for sample in samples)
    console.info(
        f"{counts.rows:,} rows, {counts.samples:,} samples, {tokens:,} tokens, "
        f"{counts.answer_tokens / max(tokens, 1):.1%} supervised, {counts.bad_rows:,} bad rows"
    )
