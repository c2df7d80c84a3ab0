"""Another engine as witness: vLLM decodes the very prompts that were decoded here, with the same drafts exported.

Prompts are taken as ids from the answers on disk, later turns behind the answers that were given here, so that both
sides read the same. What vLLM has answered is on disk at once. The module computes what is compared; how that is shown
is in witness_report.py.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspec import console
from deepspec.algorithms.checkpoint import algorithm_of, read_config
from deepspec.config import EvalConfig
from deepspec.data.journal import Journal, open_journal, read_journal
from deepspec.decoding.rounds import Round
from deepspec.errors import ConfigError, DeepSpecError, EngineError
from deepspec.evaluation.answers import Answer, answers_from_rows
from deepspec.evaluation.preparation import draft_names
from deepspec.evaluation.round_table import RoundTable, as_table
from deepspec.evaluation.statistics import paired_difference, summarise
from deepspec.evaluation.witness_report import WitnessRow
from deepspec.interop.engines import Draft, draft_facts, refusal
from deepspec.interop.export import run_export
from deepspec.interop.serving import needs_second_runner, vllm_settings
from deepspec.interop.settings import ExportConfig
from deepspec.interop.vllm_process import Decoded, Vllm, decode, find_vllm
from deepspec.targets.base import Target
from deepspec.targets.facts import read_facts
from deepspec.targets.loading import read_model_config, source_of, stop_tokens

FOLDER = "witness"
_NO_DRAWS = (
    "vLLM's second model runner, which alone serves this draft, draws with a Triton kernel that no CPU runs. Nearest: "
    "sampling.temperature=0, or a vLLM on a GPU."
)


class Witness(NamedTuple):
    """An engine that can be asked, and about which drafts.

    Attributes:
        vllm: its environment.
        drafts: that it can serve, by name: folder or hub id, and facts.
        refused: why it cannot serve the others, or not at every temperature, by name.
    """

    vllm: Vllm
    drafts: dict[str, tuple[str, Draft]]
    refused: dict[str, str]

    def can_decode(self, name: str, temperature: float) -> bool:
        """Whether a draft can be asked about at a temperature."""
        in_second_runner = needs_second_runner(self.drafts[name][1])
        return temperature == 0 or self.vllm.device != "cpu" or not in_second_runner


class Measured(NamedTuple):
    """What was measured here at one temperature.

    Attributes:
        folder: of its records.
        sampling: how tokens were drawn.
        weights: `weights_id` of each draft, by name.
    """

    folder: Path
    sampling: Mapping[str, Any]
    weights: Mapping[str, str]


def find_witness(config: EvalConfig) -> Witness | None:
    """Find out what the asked engine can do, before anything is decoded; None where none is asked for.

    Raises:
        ConfigError: there is no environment with that engine, or it can serve none of the drafts.
    """
    if config.witness.engine is None:
        return None
    target = read_facts(config.target)
    drafts: dict[str, tuple[str, Draft]] = {}
    refused: dict[str, str] = {}
    for name, path in zip(draft_names(config.drafts), config.drafts, strict=True):
        fields = read_config(path)
        facts = draft_facts(fields, algorithm_of(fields), target)
        why = refusal(facts, "vllm")
        if why is None:
            drafts[name] = path, facts
        else:
            refused[name] = why
    if not drafts:
        reasons = " ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(f"engine=vllm can serve none of the drafts. {reasons}")
    vllm = find_vllm(config.witness.python, config.witness.timeout_seconds)
    console.info(f"witness: vLLM {vllm.version} on {vllm.device}, {vllm.python}")
    witness = Witness(vllm, drafts, refused)
    for temperature in config.temperatures or (config.sampling.temperature,):
        for name in drafts:
            if not witness.can_decode(name, temperature):
                refused[f"{name} at temperature {temperature:g}"] = _NO_DRAWS
    return witness


def hear(witness: Witness, config: EvalConfig, parts: Sequence[Measured]) -> tuple[list[WitnessRow], dict[str, str]]:
    """Let the engine decode with every draft in turn what was decoded here, and compare.

    Args:
        witness: the engine.
        config: of the evaluation.
        parts: what was measured here, one a temperature.

    Returns:
        Rows of the drafts that it decoded with, and by name what went wrong with the others.
    """
    # It needs the memory that target and drafts have taken.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    rows: list[WitnessRow] = []
    failures: dict[str, str] = {}
    for part in parts:
        for name in witness.drafts:
            if name in failures or not witness.can_decode(name, part.sampling["temperature"]):
                continue
            try:
                rows += _Testimony(witness, name, config, part).rows()
            except DeepSpecError as error:
                failures[name] = str(error)
    return rows, failures


def rounds_of(decoded: Decoded, prompt_length: int) -> list[Round]:
    """VLLM's rounds as this project counts them.

    vLLM counts all accepted drafts of a round, those behind an accepted stop token too; here such a round emits the
    tokens up to the stop token and no bonus. Both count all of a round that max_new_tokens cut.

    Args:
        decoded: an answer.
        prompt_length: tokens of its prompt.
    """
    rounds: list[Round] = []
    # The prefill's own token belongs to no round.
    left, position, last = len(decoded.output_ids) - 1, prompt_length, len(decoded.accepted) - 1
    for index, (proposed, accepted) in enumerate(zip(decoded.proposed, decoded.accepted, strict=True)):
        ended_by = "reject" if accepted < proposed else "full"
        emitted = accepted + 1
        if index == last:
            ended_by = "stop" if decoded.finish_reason == "stop" else "limit"
            if ended_by == "stop" and 0 < left <= accepted:
                proposed = accepted = emitted = left
        rounds.append(
            Round(decoded.id, index, position, proposed, accepted, ended_by, None, (), 0.0, 0.0, emitted=emitted)
        )
        position += emitted
        left -= emitted
    return rounds


def undrafted(decoded: Decoded) -> int:
    """Tokens of an answer that came of steps without a draft, which no round accounts for."""
    emitted = sum(one.emitted for one in rounds_of(decoded, 0))
    return max(0, len(decoded.output_ids) - 1 - emitted)


class _Testimony:
    """What the engine says of one draft at one temperature."""

    def __init__(self, witness: Witness, name: str, config: EvalConfig, part: Measured) -> None:
        self._vllm, self._name, self._config, self._part = witness.vllm, name, config, part
        self._path, self._facts = witness.drafts[name]
        self._folder = part.folder / FOLDER
        made_with = [witness.vllm[1:], part.weights[name], config.witness.arguments]
        self._key = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]
        self._answers = {task.name: self._answered_here(task.name) for task in config.tasks}

    def rows(self) -> list[WitnessRow]:
        """Ask for what is not on disk yet, and compare."""
        with contextlib.ExitStack() as stack:
            # Held until the end: nobody else may ask the same, or write the export.
            journals = {
                task: stack.enter_context(open_journal(self._folder / f"{task}--{self._name}.jsonl"))
                for task in self._answers
            }
            heard = {task: self._known(task, journal) for task, journal in journals.items()}
            self._ask(journals, heard)
        return [self._compare(task, heard[task]) for task in self._answers]

    def _answered_here(self, task: str) -> dict[str, Answer]:
        """Answers of this project that prompts were read for, in their order."""
        path = self._part.folder / "rounds" / f"{task}--{self._name}.jsonl"
        answers = answers_from_rows(read_journal(path), self._name, self._part.weights[self._name], "", path)
        return {key: answer for key, answer in sorted(answers.items()) if answer.prompt_ids}

    def _known(self, task: str, journal: Journal) -> dict[str, Decoded]:
        """What an earlier run heard of the same engine, weights and prompts."""
        answers, known = self._answers[task], {}
        for row in journal.rows:
            answer = answers.get(row.get("id", ""))
            if row.get("made_with") == self._key and answer is not None and row["prompt_ids"] == answer.prompt_ids:
                known[row["id"]] = Decoded(**{key: row[key] for key in Decoded._fields})
        return known

    def _ask(self, journals: Mapping[str, Journal], heard: Mapping[str, dict[str, Decoded]]) -> None:
        left = [(task, key) for task, answers in self._answers.items() for key in answers if key not in heard[task]]
        if not left:
            return
        total = sum(map(len, self._answers.values()))
        with (
            self._exported() as export,
            console.progress(f"vLLM: {self._name}", total=total, done=total - len(left)) as bar,
        ):
            log = self._folder / f"{self._name}.log"
            for one in decode(self._vllm, self._job(export, left), self._config.witness.timeout_seconds, log):
                task, key = left[int(one.id)]
                decoded = one._replace(id=key)
                row = {**decoded._asdict(), "prompt_ids": self._answers[task][key].prompt_ids}
                journals[task].append({**row, "made_with": self._key})
                heard[task][key] = decoded
                bar.advance()
        missing = [f"{task}: {key}" for task, key in left if key not in heard[task]]
        if missing:
            raise EngineError(f"vLLM left {len(missing)} prompts unanswered, the first is {missing[0]}.")

    @contextlib.contextmanager
    def _exported(self) -> Iterator[Path]:
        """The draft in vLLM's format, for as long as it is needed; what a killed run left of it goes first."""
        folder = self._folder / f"{self._name}.export"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield run_export(
                ExportConfig(
                    draft=self._path,
                    format="vllm",
                    target=self._config.target,
                    output_dir=str(folder),
                    vocabulary="shared",
                    # What was measured here is asked about, whatever it is worth.
                    allow_untrained=True,
                    verify=False,
                    verify_tokens=1,
                    private=True,
                    device="cpu",
                )
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _job(self, export: Path, left: Sequence[tuple[str, str]]) -> dict[str, Any]:
        config, target = self._config, self._config.target
        speculative = vllm_settings(self._facts, str(export))
        if self._part.sampling["temperature"] > 0:
            # Its default takes the draft's best token for the draft's distribution, which accepts less.
            speculative["draft_sample_method"] = "probabilistic"
        prompts = [self._answers[task][key].prompt_ids for task, key in left]
        source, tokenizer = source_of(target), Target.load_tokenizer(target)
        return {
            "target": str(source),
            "revision": target.revision,
            "dtype": target.dtype,
            "speculative": speculative,
            "second_runner": needs_second_runner(self._facts),
            "arguments": config.witness.arguments or {},
            "batch_size": config.batch_size,
            "max_new_tokens": config.max_new_tokens,
            "max_model_len": max(map(len, prompts)) + config.max_new_tokens + self._num_draft_tokens + 1,
            "sampling": {key: self._part.sampling[key] for key in ("temperature", "top_k", "top_p")},
            "stop_token_ids": sorted(set(stop_tokens(source, target.revision, read_model_config(target), tokenizer))),
            "requests": [
                {"id": str(index), "prompt_ids": prompt, "seed": self._seed(*one)}
                for index, (prompt, one) in enumerate(zip(prompts, left, strict=True))
            ],
        }

    @property
    def _num_draft_tokens(self) -> int:
        return self._facts.algorithm.num_draft_tokens

    def _seed(self, task: str, key: str) -> int:
        text = f"{self._config.seed} {task} {key}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)

    def _compare(self, task: str, heard: Mapping[str, Decoded]) -> WitnessRow:
        answers, seed = self._answers[task], self._config.seed
        counted = {key: rounds_of(one, len(answers[key].prompt_ids)) for key, one in heard.items()}
        ours = _by_conversation({key: answer.rounds for key, answer in answers.items()}, answers)
        theirs = _by_conversation(counted, answers)
        block = self._num_draft_tokens
        mine, other = summarise(ours, block, seed), summarise(theirs, block, seed)
        has_rounds = mine.rounds > 0 and other.rounds > 0
        difference = paired_difference(theirs, ours, seed) if has_rounds else None
        raw = [accepted for one in heard.values() for accepted in one.accepted]
        equal = [key for key, answer in answers.items() if answer.output_ids == heard[key].output_ids]
        alike = [key for key in equal if _accepted(answers[key].rounds) == _accepted(counted[key])]
        is_greedy = self._part.sampling["temperature"] == 0
        return WitnessRow(
            task=task,
            draft=self._name,
            algorithm=self._facts.algorithm.name,
            method=str(vllm_settings(self._facts, "")["method"]),
            num_draft_tokens=block,
            temperature=self._part.sampling["temperature"],
            num_prompts=len(ours.prompts),
            num_answers=len(answers),
            rounds=mine.rounds,
            witness_rounds=other.rounds,
            acceptance_length=mine.acceptance_length,
            acceptance_length_ci95=mine.acceptance_length_ci95,
            witness_acceptance_length=other.acceptance_length,
            witness_acceptance_length_ci95=other.acceptance_length_ci95,
            witness_own_count=1.0 + sum(raw) / len(raw) if raw else None,
            difference=None if difference is None else difference.difference,
            difference_ci95=None if difference is None else difference.ci95,
            survival=tuple(mine.survival),
            witness_survival=tuple(other.survival),
            same_answers=len(equal) if is_greedy else None,
            same_rounds=len(alike) if is_greedy else None,
            undrafted_tokens=sum(map(undrafted, heard.values())),
        )


def _accepted(rounds: Sequence[Round]) -> list[int]:
    return [one.accepted for one in rounds]


def _by_conversation(rounds: Mapping[str, Sequence[Round]], answers: Mapping[str, Answer]) -> RoundTable:
    """Turns of a conversation are one unit of the intervals, on both sides."""
    grouped: dict[str, list[Round]] = {}
    for key, some in rounds.items():
        grouped.setdefault(answers[key].conversation, []).extend(some)
    return as_table(grouped)
