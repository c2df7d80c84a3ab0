"""Decodes the prompts of a task, turn after turn, in one process or several; what is finished is on disk at once.

The main process says what is left to do, every process takes prompts from that list as it becomes free, and the main
one collects. It computes no statistic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspec import console
from deepspec.config import TaskConfig
from deepspec.data.chat_template import answer_message
from deepspec.data.journal import Journal, open_journal, read_journal
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Request, generate
from deepspec.evaluation.answers import Answer, answers_from_rows, to_row
from deepspec.evaluation.crew import Crew
from deepspec.evaluation.preparation import NamedDraft, Prepared
from deepspec.evaluation.tasks import Prompt

_NO_ROOM = "context"


class Play:
    """One draft on one task.

    Args:
        prepared: the evaluation.
        draft: which draft.
        task: which task.
        prompts: of the task.
        crew: the processes.
    """

    def __init__(
        self, prepared: Prepared, draft: NamedDraft, task: TaskConfig, prompts: Sequence[Prompt], crew: Crew
    ) -> None:
        self._prepared, self._draft, self._task, self._crew = prepared, draft, task, crew
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._order = [f"{prompt.id}#{turn}" for prompt in prompts for turn in range(len(prompt.turns))]
        name = f"{task.name}--{draft.name}"
        self._journal = prepared.folder / "rounds" / f"{name}.jsonl"
        self._parts = prepared.folder / "parts"
        self._part_name = name
        self._template = prepared.template
        has_later_turns = any(len(prompt.turns) > 1 for prompt in prompts)
        self._marks = self._template.reasoning_marks() if has_later_turns else None
        self._stage_name = f"{prepared.config.sampling.temperature:g}/{name}"

    def answers(self) -> list[Answer]:
        """Decode what the journals lack and return all answers, in the order of the prompts.

        Raises:
            DataError: a journal cannot be written, is damaged, or holds answers of other weights.
        """
        with open_journal(self._journal) as journal:
            answers = self._known(journal.rows, self._journal)
            self._collect(journal, answers)
            done = {"turns": len(answers), "emitted": 0, "rounds": 0}
            done["emitted"] = sum(one.emitted for answer in answers.values() for one in answer.rounds)
            done["rounds"] = sum(len(answer.rounds) for answer in answers.values())
            title = f"{self._task.name}: {self._draft.name}"
            with console.progress(title, total=len(self._order), done=done["turns"]) as bar:
                shown = done["turns"]

                def show() -> None:
                    nonlocal shown
                    now = {key: done[key] + self._crew.count(f"{self._stage_name}/{key}") for key in done}
                    bar.advance(now["turns"] - shown, f"tau {now['emitted'] / max(now['rounds'], 1):.2f}")
                    shown = now["turns"]

                stage = 0
                while (left := self._pending(answers, journal)) is not None:
                    name = f"{self._stage_name}/{stage}"
                    # The others read earlier turns in it.
                    journal.sync()
                    self._crew.post(name, json.dumps(left))
                    for answer in self._decode(self._requests(left, answers), name):
                        journal.append(self._row(answer))
                        answers[answer.request_id] = answer
                        show()
                    self._crew.wait_for_others(name, show)
                    self._collect(journal, answers)
                    stage += 1
                self._crew.post(f"{self._stage_name}/{stage}", "null")
        return [answers[key] for key in self._order if key in answers]

    def help(self) -> None:
        """Decode prompts for the main process into a journal of this one, until nothing is left."""
        stage = 0
        path = self._parts / f"{self._part_name}.{self._crew.rank}.jsonl"
        while (left := json.loads(self._crew.receive(f"{self._stage_name}/{stage}"))) is not None:
            name = f"{self._stage_name}/{stage}"
            if self._crew.enter(name):
                answers = self._known(read_journal(self._journal), self._journal)
                with open_journal(path) as journal:
                    for answer in self._decode(self._requests(left, answers), name):
                        journal.append(self._row(answer))
            self._crew.leave(name)
            stage += 1

    def _known(self, rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Answer]:
        draft = self._draft
        return answers_from_rows(rows, draft.name, draft.weights, draft.cut_by, path)

    def _row(self, answer: Answer) -> dict[str, Any]:
        return to_row(answer, self._draft.path, self._draft.weights, self._draft.cut_by)

    def _collect(self, journal: Journal, answers: dict[str, Answer]) -> None:
        """Move what other processes have answered, now or before a kill, into the journal."""
        for path in self._part_files():
            with open_journal(path) as part:
                for key, answer in self._known(part.rows, path).items():
                    if key not in answers:
                        journal.append(self._row(answer))
                        answers[key] = answer
            journal.sync()
            path.unlink()
            Path(f"{path}.lock").unlink(missing_ok=True)

    def _part_files(self) -> list[Path]:
        start, end = f"{self._part_name}.", ".jsonl"
        found = sorted(self._parts.iterdir()) if self._parts.is_dir() else []
        return [path for path in found if path.name.removeprefix(start).removesuffix(end).isdigit()]

    def _pending(self, answers: dict[str, Answer], journal: Journal) -> list[str] | None:
        """Requests of the first turn that is not complete; None where all are.

        Turns that the target has no room for are answered with nothing here.
        """
        longest = max((len(prompt.turns) for prompt in self._prompts.values()), default=0)
        for turn in range(longest):
            left = []
            for key in self._order:
                if key in answers or int(key.rsplit("#", 1)[1]) != turn:
                    continue
                if turn and not self._fits(key, answers):
                    answer = Answer(key, [], [], [], _NO_ROOM, self._domain(key))
                    journal.append(self._row(answer))
                    answers[key] = answer
                    continue
                left.append(key)
            if left:
                return left
        skipped = sum(answer.finish_reason == _NO_ROOM for answer in answers.values())
        if skipped:
            console.info(
                f"{self._task.name}: {self._draft.name}: {skipped} later turns left out, for which "
                f"{self._prepared.target.context_length} positions are not enough."
            )
        return None

    def _fits(self, key: str, answers: Mapping[str, Answer]) -> bool:
        name, turn = key.rsplit("#", 1)
        if any(answers[f"{name}#{earlier}"].finish_reason == _NO_ROOM for earlier in range(int(turn))):
            return False
        needed = len(self._request(key, answers).prompt_ids) + self._prepared.room(self._draft.model)
        return needed <= self._prepared.target.context_length

    def _requests(self, keys: Sequence[str], answers: Mapping[str, Answer]) -> list[Request]:
        return [self._request(key, answers) for key in keys]

    def _request(self, key: str, answers: Mapping[str, Answer]) -> Request:
        """A turn as the target reads it: behind the answers that this draft gave before."""
        name, turn = key.rsplit("#", 1)
        prompt = self._prompts[name]
        history: list[Message] = []
        for earlier in range(int(turn)):
            ids = answers[f"{name}#{earlier}"].output_ids
            answer = answer_message(self._template, ids, self._prepared.target.stop_token_ids, self._marks)
            history += [Message("user", prompt.turns[earlier]), answer]
        return Request(key, self._prepared.render([*history, Message("user", prompt.turns[int(turn)])]))

    def _decode(self, requests: Sequence[Request], stage: str) -> Iterator[Answer]:
        """Decode this process's part of the requests and count it for the progress bar."""
        prompt_ids = {request.prompt_id: list(request.prompt_ids) for request in requests}
        longest = max(map(len, prompt_ids.values()))
        fitting = self._prepared.batch_size(self._draft.model, longest)
        for finished in generate(
            self._prepared.target,
            self._draft.model,
            requests,
            self._prepared.sampling,
            max_new_tokens=self._prepared.config.max_new_tokens,
            # A process that took a whole batch of a short list would leave nothing for the others.
            batch_size=min(fitting, -(-len(requests) // self._crew.size)),
            seed=self._prepared.config.seed,
            schedule=self._draft.schedule,
            timers=False,
            overlap=True,
            claim=self._crew.claim(stage),
        ):
            self._crew.count(f"{self._stage_name}/turns", 1)
            self._crew.count(f"{self._stage_name}/emitted", sum(one.emitted for one in finished.rounds))
            self._crew.count(f"{self._stage_name}/rounds", len(finished.rounds))
            key = finished.prompt_id
            yield Answer(
                key, prompt_ids[key], finished.output_ids, finished.rounds, finished.finish_reason, self._domain(key)
            )

    def _domain(self, key: str) -> str:
        return self._prompts[key.rsplit("#", 1)[0]].domain
