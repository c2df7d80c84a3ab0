"""A tiny target, its answers and runs over them, as a user would have them on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.config import TrainConfig, compose_train

VOCAB_SIZE = 96


def save_target(folder: Path) -> None:
    """A tiny random Llama with a tokenizer, as a user would have it on disk."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(folder)
    words = WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w3")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def save_answers(path: Path, count: int = 7) -> None:
    """Answers of very different length, one of them too short to hold an anchor with its label."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        length = 1 if number == 2 else int(torch.randint(4, 60, (1,), generator=generator))
        prompt, answer = (torch.randint(4, 90, (size,), generator=generator).tolist() for size in (5, length))
        rows.append(
            {
                "id": f"p{number}",
                "domain": "",
                "messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}],
                "prompt_ids": [prompt],
                "answer_ids": [answer],
                "finish_reason": ["length"],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_place(folder: Path, answers: int = 7) -> Path:
    """Put a target and so many answers into a folder, for runs."""
    save_target(folder / "target")
    save_answers(folder / "answers.jsonl", answers)
    return folder


def words_for(place: Path, name: str, *overrides: str, algorithm: str = "dspark", processes: int = 1) -> list[str]:
    """The words after `python train.py`; one process is engine=single, several are engine=ddp unless told otherwise."""
    return [
        f"algorithm={algorithm}",
        "target=smollm2_135m",
        "optimizer=adamw",
        f"target.name_or_path={place / 'target'}",
        "target.layers=[0,1,3]",
        f"target.mask_token_id={VOCAB_SIZE - 1}",
        "target.dtype=float32",
        f"data.answers={place / 'answers.jsonl'}",
        "data.max_length=64",
        "data.num_anchors=5",
        "data.min_answer_tokens=1",
        f"output_dir={place}",
        f"exp_name={name}",
        f"engine={'single' if processes == 1 else 'ddp'}",
        f"engine.num_processes={processes}",
        "engine.device=cpu",
        "engine.precision=fp32",
        "optimizer.epochs=null",
        "optimizer.steps=5",
        "optimizer.global_batch_size=4",
        "optimizer.micro_batch_size=1",
        "optimizer.learning_rate=1.0e-3",
        "logger.every_steps=1",
        "checkpoint.every_steps=2",
        *overrides,
    ]


def make_config(place: Path, name: str, *overrides: str, algorithm: str = "dspark", processes: int = 1) -> TrainConfig:
    """The run that these words make."""
    return compose_train(words_for(place, name, *overrides, algorithm=algorithm, processes=processes))


def read_losses(config: TrainConfig) -> list[dict[str, float]]:
    """The lines of a run's metrics without its speed; null, written where nothing was counted, is NaN again."""
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    speed = ("tokens_per_second", "seconds_per_step")
    return [
        {key: float("nan") if value is None else value for key, value in line.items() if key not in speed}
        for line in lines
    ]
