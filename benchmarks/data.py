"""Throughput of the data pipeline: answers against transformers' generate, masks, and feature caches against the disk.

    python -m benchmarks.data [--parts answers masks caches] [--prompts 128] [--tokens 128] [--repeats 3] [--rows 1500]
                              [--cache_mib 64] [--folder DIR] [--tiny]

Answers come from the embedded target, greedy, the same prompts and limits on both sides in turns: `deepspec data
regenerate` as it is, and `generate` over batches of 64 in the order of the prompts, which waits for the longest answer
of each. Lengths are mixed: every other prompt asks for a short answer. 128 prompts are two full batches for `generate`
and as many places refilled once for ours; more prompts or longer answers would favour ours. Tokens must be the same up
to the rounding of bf16, and all of them in fp32. DIR is where caches and files are written: the disk that is measured.

About seven minutes on two cores, if nothing else runs there: five for the answers, the rest for masks and caches. Masks
are made of answers, so `--parts masks` answers the prompts once by ours.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.cases import TINY, make_target, results_folder, table, write_result
from benchmarks.data_caches import measure_caches
from deepspec.attention import GROUPED_SDPA
from deepspec.config import TargetConfig, compose_data_job, compose_train
from deepspec.data.answer_rows import SampleMaker
from deepspec.data.chat_template import ChatTemplate
from deepspec.data.journal import read_journal
from deepspec.data.prompts import Conversation
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.data.row_workers import row_outcomes
from deepspec.data.samples import read_token_samples
from deepspec.data.synthetic import synthetic_prompts
from deepspec.decoding.sampling import Sampling
from deepspec.runtime import available_cpus, choose_device
from deepspec.targets.base import Target

BATCH, GOAL = 64, 1.5
PARTS = ("answers", "masks", "caches")
# What the exact comparison in fp32 is made on.
EXACT_PROMPTS, EXACT_TOKENS = 8, 48
# How many times the rows that one process reads for those of several: while their start lasts they are not at work.
STEADY = 8


class Case(NamedTuple):
    """A target, how it is named in answers, and its prompts.

    Attributes:
        batch: prompts in flight on both sides.
    """

    target: Target
    config: TargetConfig
    prompts: list[Conversation]
    batch: int


def mixed_prompts(count: int) -> list[Conversation]:
    """Prompts of all three domains; of every two, one asks for a short answer."""
    prompts = synthetic_prompts("held_out", count, 0)
    for index in range(0, count, 2):
        (turn,) = prompts[index].turns
        asked = turn._replace(content=f"{turn.content} Answer in one short sentence.")
        prompts[index] = prompts[index]._replace(turns=(asked,))
    return prompts


def embedded(prompts: int) -> Case:
    """The embedded target."""
    config = compose_data_job(["target=smollm2_135m"]).target
    return Case(Target.load(config, choose_device("cpu")), config, mixed_prompts(prompts), BATCH)


def made_up(prompts: int) -> Case:
    """A tiny random target whose tokens are bytes."""
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made = make_target(TINY, is_runnable=True)
    # A head that is the embedding would repeat the prompt's last token, a line break, for ever.
    made.model.lm_head.weight = torch.nn.Parameter(made.model.lm_head.weight.roll(7, dims=0).detach().clone())
    target = Target(made.model, tokenizer, name="made-up", stop_token_ids=[1])
    config = compose_data_job(["target=smollm2_135m"]).target.model_copy(update={"name_or_path": "made-up"})
    return Case(target, config, mixed_prompts(prompts), 4)


def copied(target: Target, dtype: torch.dtype, attention: str) -> Any:
    """A model of transformers with the target's weights."""
    config = copy.deepcopy(target.model.config)
    config._attn_implementation = attention
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.load_state_dict(target.model.state_dict())
    return model


def exactly(case: Case, prompts: int) -> Case:
    """The same weights in fp32, with the first prompts."""
    old = case.target
    model = copied(old, torch.float32, GROUPED_SDPA)
    target = Target(model, old.tokenizer, name=old.name, stop_token_ids=old.stop_token_ids)
    return case._replace(target=target, prompts=case.prompts[:prompts])


# Answers --------------------------------------------------------------------------------------------------------------


def answered(case: Case, tokens: int, folder: Path) -> list[list[int]]:
    """Ids of all answers by `deepspec data regenerate`."""
    path = folder / "answers.jsonl"
    path.unlink(missing_ok=True)
    settings = AnswerSettings(Sampling(temperature=0.0), max_new_tokens=tokens, seed=0, batch_size=case.batch)
    answer_prompts(case.target, case.config, case.prompts, settings, path)
    ids = {row["id"]: row["answer_ids"][0] for row in read_journal(path)}
    return [ids[conversation.id] for conversation in case.prompts]


def generated(case: Case, peer: Any, tokens: int) -> list[list[int]]:
    """Ids of all answers by transformers: batches in the order of the prompts, padded on the left."""
    tokenizer, stops = case.target.tokenizer, case.target.stop_token_ids
    template = ChatTemplate(tokenizer, case.config.enable_thinking, case.config.system_prompt)
    found = []
    for begin in range(0, len(case.prompts), case.batch):
        texts = [template.prompt(list(one.turns)) for one in case.prompts[begin : begin + case.batch]]
        given = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        output = peer.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=list(stops),
            pad_token_id=tokenizer.pad_token_id,
        )
        for row in output[:, given["input_ids"].shape[1] :].tolist():
            end = next((index + 1 for index, token in enumerate(row) if token in stops), tokens)
            found.append(row[:end])
        tokenizer.batch_decode(output)  # regenerate writes text as well
    return found


def differing(case: Case, exact: Target, ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    """How many answers differ; where each first does, rounding must be able to decide between the two tokens.

    From there on they are answers to different texts. A bf16 logit is off from the fp32 one by up to e there, in
    another way in every shape of batch: two tokens change places only if their fp32 logits lie within 2 e.
    """
    template = ChatTemplate(case.target.tokenizer, case.config.enable_thinking, case.config.system_prompt)
    count = 0
    for conversation, mine, other in zip(case.prompts, ours, theirs, strict=True):
        if mine == other:
            continue
        count += 1
        at = next(index for index, (one, two) in enumerate(zip(mine, other, strict=False)) if one != two)
        ids = torch.tensor([[*template.tokenize(template.prompt(list(conversation.turns))), *mine[:at]]])
        rounded, true = (target.logits(target.features(ids)[1][0, -1]) for target in (case.target, exact))
        error = float((rounded - true).abs().max())
        apart = float(true.max() - true[[mine[at], other[at]]].min())
        assert apart <= 2 * error, f"{conversation.id}: token {at} is {apart:.3f} apart, rounding {error:.3f}"
    return count


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def measure_answers(case: Case, exact: Case, tokens: int, repeats: int, folder: Path) -> str:
    """Tokens per second of both sides; leaves the answers in the folder."""
    peer = copied(case.target, case.target.dtype, "sdpa")
    few = case._replace(prompts=case.prompts[:2])
    answered(few, 4, folder)
    generated(few, peer, 4)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    found: dict[str, list[list[int]]] = {}
    for repeat in range(repeats):
        sides = [("ours", lambda: answered(case, tokens, folder)), ("theirs", lambda: generated(case, peer, tokens))]
        for name, work in sides if repeat % 2 == 0 else reversed(sides):
            taken, found[name] = timed(work)
            seconds[name].append(taken)
            print(name, f"{taken:.1f} s", flush=True)
    ours, theirs = found["ours"], found["theirs"]
    changed = differing(case, exact.target, ours, theirs)
    with tempfile.TemporaryDirectory(dir=folder) as other:
        exact_ours = answered(exact, EXACT_TOKENS, Path(other))
    exact_peer = copied(exact.target, torch.float32, "sdpa")
    assert exact_ours == generated(exact, exact_peer, EXACT_TOKENS), "other tokens in fp32"
    rates = {name: [sum(map(len, found[name])) / taken for taken in seconds[name]] for name in found}
    ratio = median(rates["ours"]) / median(rates["theirs"])
    lengths = sorted(map(len, ours))
    rows = [
        [
            "transformers' generate, batches as they come",
            sum(map(len, theirs)),
            f"{median(seconds['theirs']):.1f}",
            f"{median(rates['theirs']):.0f}",
            _range(rates["theirs"]),
            "1.0x",
        ],
        [
            "`deepspec data regenerate`",
            sum(map(len, ours)),
            f"{median(seconds['ours']):.1f}",
            f"{median(rates['ours']):.0f}",
            _range(rates["ours"]),
            f"**{ratio:.2f}x** (goal {GOAL:g}x)",
        ],
    ]
    return "\n\n".join(
        [
            f"{len(case.prompts)} prompts, at most {tokens} new tokens, greedy, batch {case.batch}, "
            f"{torch.get_num_threads()} threads, {str(case.target.dtype).removeprefix('torch.')}, target "
            f"{case.target.name}. Answers have {lengths[0]} to {lengths[-1]} tokens, on average "
            f"{sum(lengths) / len(lengths):.0f}, a quarter up to {lengths[len(lengths) // 4]}, half up to "
            f"{lengths[len(lengths) // 2]}; {sum(length == tokens for length in lengths)} reach the limit. Templates, "
            "tokenising and text are part of both times, writing the answers only of ours. Medians of "
            f"{repeats} runs of each side in turns.",
            table(["who", "tokens", "seconds", "tokens/s", "lowest to highest", "over generate"], rows),
            f"{len(ours) - changed} of {len(ours)} answers ({(len(ours) - changed) / len(ours):.0%}) have the same "
            "tokens; each of the others first differs where two logits lie nearer to each other than bf16 is exact. In "
            f"fp32 all tokens of {len(exact.prompts)} answers of up to {EXACT_TOKENS} are the same.",
        ]
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f}-{max(values):.0f}"


# Masks ----------------------------------------------------------------------------------------------------------------


def steady_rate(maker: SampleMaker, workers: int, count: int) -> float:
    """Rows per second after the first fifth of a file, when processes have started and all of them are at work."""
    first = count // 5
    rows = row_outcomes(maker, workers, rows_alone=0)
    list(itertools.islice(rows, first))
    seconds, rest = timed(lambda: sum(1 for _ in rows))
    assert first + rest == count
    return rest / seconds


def measure_masks(case: Case, count: int, repeats: int, folder: Path) -> str:
    """Rows per second from an answers file to samples, with kept ids and from texts alone."""
    given = [row for row in read_journal(folder / "answers.jsonl") if row["messages"][-1]["content"].strip()]
    assert given, "every answer is empty"
    data = compose_train(["experiment=dspark_smollm2_135m"]).data.model_copy(
        update={"max_length": 4096, "min_answer_tokens": 1, "on_bad_row": "skip"}
    )
    data = data.model_copy(update={"workers": 1})
    options = {"enable_thinking": case.config.enable_thinking, "system_prompt": case.config.system_prompt}
    rows, many = [], STEADY * count
    path = folder / "rows.jsonl"
    for kind, size, dropped in (("ids kept", count, set()), ("texts alone", many, {"prompt_ids", "answer_ids"})):
        with path.open("w", encoding="utf-8") as file:
            for number in range(size):
                row = {key: value for key, value in given[number % len(given)].items() if key not in dropped}
                file.write(json.dumps(row | {"id": str(number)}) + "\n")
        read = functools.partial(read_token_samples, path, case.target.tokenizer, data, **options)
        taken, results = zip(*(timed(read) for _ in range(repeats)), strict=True)
        samples, counts = results[0]
        tokens, seconds = sum(len(sample.input_ids) for sample in samples), median(taken)
        speed = f"{size / seconds:,.0f}", f"{tokens / seconds:,.0f}"
        rows.append([kind, size, counts.bad_rows, tokens // len(samples), *speed])
        print(rows[-1], flush=True)
    maker = SampleMaker(path, case.target.tokenizer, data, *options.values(), None, None)
    rates = {
        workers: [steady_rate(maker, workers, many) for _ in range(repeats)]
        for workers in (1, min(2, available_cpus()))
    }
    by_processes = [
        [workers, f"{median(found):,.0f}", _range(found), f"{median(found) / median(rates[1]):.2f}x"]
        for workers, found in rates.items()
    ]
    for row in by_processes:
        print("processes", row, flush=True)
    return "\n\n".join(
        [
            "From a file of answers to samples: JSON, checks, template and tokenizer where ids are not kept, masks. "
            f"One process on {available_cpus()} cores; the answers above, repeated. Medians of {repeats}.",
            table(["rows with", "rows", "refused", "tokens a row", "rows/s", "tokens/s"], rows),
            "Texts alone by several processes, once these are at work: their start takes some seconds, which is why a "
            "training starts them for more than a thousand rows only.",
            table(["processes", "rows/s", "lowest to highest", "over one"], by_processes),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--rows", type=int, default=1500, help="rows of an answers file")
    parser.add_argument("--cache_mib", type=int, default=64, help="features of a cache in bf16")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where files are written; the disk that is measured")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result file")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.prompts, chosen.tokens, chosen.rows, chosen.cache_mib, chosen.repeats = 6, 12, 12, 1, 1
    case = made_up(chosen.prompts) if chosen.tiny else embedded(chosen.prompts)
    text = []
    with tempfile.TemporaryDirectory(prefix="deepspec-bench-data-", dir=chosen.folder) as name:
        folder = Path(name)
        if "answers" in chosen.parts:
            exact = exactly(case, EXACT_PROMPTS)
            text += ["## Answers", measure_answers(case, exact, chosen.tokens, chosen.repeats, folder)]
        elif "masks" in chosen.parts:
            answered(case, chosen.tokens, folder)
        if "masks" in chosen.parts:
            text += ["## Masks", measure_masks(case, chosen.rows, chosen.repeats, folder)]
        if "caches" in chosen.parts:
            found = measure_caches(case.target, case.config, chosen.cache_mib, chosen.repeats, folder)
            text += ["## Feature caches", found]
    device = case.target.device
    print(write_result("data", "Data pipeline", "\n\n".join(text), device, folder=results_folder(chosen)))


if __name__ == "__main__":
    main()
