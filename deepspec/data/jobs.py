"""The `deepspec data` jobs: prompts in, answers out, and a look at what a draft will learn from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec import console
from deepspec.config import DataJobConfig
from deepspec.data.cache_format import bytes_per_sample
from deepspec.data.cache_manifest import manifest_of
from deepspec.data.cache_writer import check_disk, free_bytes, in_words, open_writer
from deepspec.data.features import FeatureMemory, PassSink
from deepspec.data.inspect import render_sample
from deepspec.data.kept_samples import SampleCounts
from deepspec.data.packed import PackedSamples
from deepspec.data.prompt_file import PromptFile, Prompts
from deepspec.data.prompts import read_rows, row_of
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.data.samples import read_token_samples
from deepspec.data.selection import write_selected
from deepspec.data.server import answer_prompts_by_server, describe_counts
from deepspec.data.sources import source_files
from deepspec.data.stats import measure, read_turns, statistics_table, write_page
from deepspec.data.synthetic import synthetic_prompts
from deepspec.decoding.sampling import Sampling, check_sampling
from deepspec.errors import ConfigError, DataError
from deepspec.files import write_jsonl
from deepspec.runtime import choose_device
from deepspec.targets.base import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUILT_IN_COUNT = 1500
# What a killed job loses of the features that it has captured.
_CAPTURED_SHARD_MIB = 256


def load_prompts(config: DataJobConfig) -> Prompts:
    """The job's prompts: those of its file, or the built-in ones where no file is named."""
    if config.prompts is None and config.dataset.hub_id is not None:
        raise ConfigError(
            f"dataset {config.dataset.name} is read by `deepspec data prompts dataset={config.dataset.name}`; give the "
            "file that it writes: prompts=<output_dir>/prompts.jsonl."
        )
    if config.prompts is None:
        return synthetic_prompts("train", config.limit or _BUILT_IN_COUNT, config.seed)
    prompts = PromptFile(config.prompts, config.on_bad_row, config.limit)
    for reason, count in prompts.skipped.items():
        console.info(f"{config.prompts}: {count:,} left out ({reason})")
    return prompts


def write_prompts(config: DataJobConfig) -> Path:
    """Choose prompts and write `prompts.jsonl`, `held_out.jsonl` and `report.json` into the output folder.

    The built-in prompts, which differ by construction, are written as they are.

    Raises:
        DataError: a prompt is broken and may not be skipped, or the folder cannot be written.
    """
    path = Path(config.output_dir) / "prompts.jsonl"
    if config.prompts is not None:
        for file in source_files(config):
            read_rows(file)  # only looks whether it is there, so that a wrong name leaves nothing behind
            if file.resolve() in (path.resolve(), path.with_name("held_out.jsonl").resolve()):
                raise DataError(f"{file} would be written over the prompts themselves. Choose another output_dir.")
    elif config.dataset.hub_id is None:
        return _write_built_in_prompts(config, path)
    return write_selected(config, path)


def _write_built_in_prompts(config: DataJobConfig, path: Path) -> Path:
    conversations = load_prompts(config)
    try:
        write_jsonl(path, map(row_of, conversations))
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Choose another output_dir.") from error
    console.info(f"{len(conversations):,} prompts: {path}")
    return path


def write_answers(config: DataJobConfig, memory: FeatureMemory | None = None) -> Path:
    """Let the target answer the prompts; a rerun continues by id.

    Args:
        config: the job.
        memory: keeps the target's states for a training in the same process, unless `config.cache` takes them.
    """
    path = Path(config.answers)
    if path.suffix != ".jsonl":
        raise ConfigError(f"answers {path}: answers are written as JSONL, and read by that name. End it in .jsonl.")
    if config.prompts is not None and path.resolve() == Path(config.prompts).resolve():
        raise ConfigError(f"answers {path} is the file of prompts. Choose another file for the answers.")
    if config.source == "server" and config.cache is not None:
        raise ConfigError(
            f"cache {config.cache}: a server keeps its target's states to itself. Use source=in_process, or leave the "
            "cache out and write it afterwards with `deepspec data cache`."
        )
    sampling = check_sampling(Sampling(**config.sampling.model_dump()))
    conversations = load_prompts(config)
    settings = AnswerSettings(sampling, config.max_new_tokens, config.seed, config.batch_size)
    if config.source == "server":
        tokenizer = Target.load_tokenizer(config.target)
        counts = answer_prompts_by_server(
            tokenizer, config.target, config.server, conversations, settings, path, config.on_bad_row
        )
        for line in describe_counts(counts):
            console.info(line)
        count = counts.rows
    else:
        target = Target.load(config.target, choose_device(config.device))
        with _sink(config, target, memory, len(conversations)) as sink:
            count = answer_prompts(target, config.target, conversations, settings, path, sink, config.on_bad_row)
    console.info(f"{count:,} answered prompts: {path}")
    if isinstance(conversations, PromptFile):
        conversations.check_unchanged()  # answering goes on long after the last prompt was read
    return path


@contextmanager
def _sink(
    config: DataJobConfig, target: Target, memory: FeatureMemory | None, num_prompts: int
) -> Iterator[PassSink | None]:
    """What takes the target's states: the job's cache, or else the memory."""
    if config.cache is None:
        yield memory
        return
    folder, manifest = Path(config.cache), manifest_of(target, config.target, config.cache_encoding, None)
    taps, length = len(target.layer_ids), config.max_new_tokens
    # How long answers and prompts will be nobody knows before; one file must fit in any case.
    longest = bytes_per_sample(length + 1, length, target.hidden_size, taps, config.cache_encoding)
    console.info(
        f"{folder}: {in_words(longest // length)} a token of an answer in {config.cache_encoding}, for {num_prompts:,} "
        f"answers of {length:,} tokens {in_words(num_prompts * longest)} and their prompts; "
        f"{in_words(free_bytes(folder))} are free"
    )
    check_disk(folder, min(num_prompts * longest, _CAPTURED_SHARD_MIB * 2**20))
    with open_writer(folder, target, manifest, _CAPTURED_SHARD_MIB) as writer:
        yield writer
    console.info(f"features of {writer.written:,} samples: {folder}")


def show_samples(config: DataJobConfig) -> None:
    """Print the first samples of an answers file with the supervised tokens coloured, and counts over the file.

    Raises:
        DataError: there is no such file, or it holds broken rows that may not be skipped.
    """
    tokenizer, samples, counts = _whole_samples(config)
    for sample in samples[: config.samples]:
        console.text(render_sample(tokenizer, sample))
    tokens = sum(len(sample.input_ids) for sample in samples)
    console.info(
        f"{counts.rows:,} rows, {counts.samples:,} samples, {tokens:,} tokens, "
        f"{counts.answer_tokens / max(tokens, 1):.1%} supervised, {counts.bad_rows:,} bad rows"
    )


def write_statistics(config: DataJobConfig) -> Path:
    """Print what an answers file holds and what a training would make of it, and write a page with histograms.

    Returns:
        The page, beside the answers.

    Raises:
        DataError: there is no such file, it holds broken rows that may not be skipped, or the page cannot be written.
    """
    _, samples, counts = _whole_samples(config)
    answers = Path(config.answers)
    found = measure(samples, counts, read_turns(answers), config.stats.data, config.stats.optimizer, config.seed)
    console.table(statistics_table(found))
    page = answers.with_suffix(".stats.html")
    try:
        write_page(page, found, str(answers))
    except OSError as error:
        raise DataError(f"{page} cannot be written ({error.strerror}). Copy the answers where it can be.") from error
    console.info(f"histograms: {page}")
    return page


def _whole_samples(config: DataJobConfig) -> tuple[PreTrainedTokenizerBase, PackedSamples, SampleCounts]:
    """The target's tokenizer, and all samples of the job's answers at full length."""
    if not Path(config.answers).exists():
        raise DataError(
            f"{config.answers} does not exist. Make it with `deepspec data regenerate answers={config.answers}`."
        )
    unlimited = {"answers": config.answers, "max_length": 2**20, "min_answer_tokens": 1, "allow_other_target": True}
    data = config.stats.data.model_copy(update={**unlimited, "on_bad_row": config.on_bad_row})
    tokenizer = Target.load_tokenizer(config.target)
    samples, counts = read_token_samples(
        Path(config.answers),
        tokenizer,
        data,
        enable_thinking=config.target.enable_thinking,
        system_prompt=config.target.system_prompt,
    )
    return tokenizer, samples, counts
