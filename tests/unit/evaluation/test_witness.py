"""vLLM's rounds counted as ours, and what is refused or doubted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from deepspec.config import compose_eval
from deepspec.decoding.lane import HostRound, Lane, Request
from deepspec.decoding.rounds import Round
from deepspec.errors import ConfigError
from deepspec.evaluation.witness import rounds_of, undrafted
from deepspec.evaluation.witness_report import WitnessRow, remarks, witness_section, write_witness
from deepspec.interop.vllm_process import Decoded

STOP = 3
ROW = WitnessRow(
    task="gsm8k",
    draft="eagle3",
    algorithm="eagle3",
    method="eagle3",
    num_draft_tokens=4,
    temperature=0.0,
    num_prompts=8,
    num_answers=9,
    rounds=100,
    witness_rounds=101,
    acceptance_length=2.0,
    acceptance_length_ci95=(1.8, 2.2),
    witness_acceptance_length=1.98,
    witness_acceptance_length_ci95=(1.78, 2.18),
    witness_own_count=1.99,
    difference=-0.02,
    difference_ci95=(-0.05, 0.01),
    survival=(0.5, 0.3, 0.1, 0.1),
    witness_survival=(0.5, 0.3, 0.1, 0.1),
    same_answers=9,
    same_rounds=8,
    undrafted_tokens=0,
)


def both_sides(seed: int) -> tuple[Lane, Decoded]:
    """The same random rounds as our decoder records them, and as vLLM reports them."""
    draw = random.Random(seed)
    block, limit = draw.randint(1, 5), draw.randint(1, 12)
    lane = Lane(Request("p", [9] * draw.randint(1, 6)), draw.choice([1, 1, 1, STOP]))
    output, proposed, accepted = list(lane.output), [], []
    finish = "stop" if output == [STOP] else "length" if limit == 1 else None
    while finish is None:
        tokens = [draw.choice([1, 1, 1, 1, STOP]) for _ in range(block)]
        kept, bonus = draw.randint(0, block), draw.choice([1, 1, 1, STOP])
        host = HostRound([tokens], [kept], [bonus], [block], [False], None, [[0.5] * block], None)
        ending = lane.record(host, 0, (0.0, 0.0), frozenset({STOP}), limit)
        # vLLM counts the round as it was verified, then cuts the answer at the first stop token or at the limit.
        proposed.append(block)
        accepted.append(kept)
        for token in [*tokens[:kept], bonus]:
            if finish is None:
                output.append(token)
                finish = "stop" if token == STOP else "length" if len(output) == limit else None
        assert (ending is None) == (finish is None)
    return lane, Decoded("p", output, finish, proposed, accepted)


@pytest.mark.parametrize("seed", range(300))
def test_rounds_of_vllm_are_counted_as_our_decoder_counts_them(seed: int) -> None:
    lane, decoded = both_sides(seed)

    def counts(rounds: list[Round]) -> list[tuple[int, ...]]:
        return [(one.round, one.position, one.proposed, one.accepted, one.emitted) for one in rounds]

    mine, theirs = counts(lane.rounds), counts(rounds_of(decoded, len(lane.request.prompt_ids)))
    # A stop token right at or behind the limit: vLLM says length, and both count the whole round or up to the token.
    if decoded.finish_reason == "length" and STOP in decoded.output_ids + lane.output:
        mine, theirs = mine[:-1], theirs[:-1]
    assert mine == theirs
    assert undrafted(decoded) == 0


def test_a_stop_token_among_accepted_drafts_ends_the_round_there() -> None:
    decoded = Decoded("p", [8, 8, STOP], "stop", [5], [5])
    (one,) = rounds_of(decoded, 10)
    assert (one.position, one.proposed, one.accepted, one.emitted, one.ended_by) == (10, 2, 2, 2, "stop")


def test_a_bonus_token_that_stops_is_emitted() -> None:
    (one,) = rounds_of(Decoded("p", [8, 8, 8, STOP], "stop", [5], [2]), 10)
    assert (one.proposed, one.accepted, one.emitted, one.ended_by) == (5, 2, 3, "stop")


def test_a_round_that_the_limit_cut_counts_all_that_it_verified() -> None:
    first, last = rounds_of(Decoded("p", [8] * 5, "length", [4, 4], [1, 4]), 10)
    assert (first.emitted, first.ended_by) == (2, "reject")
    assert (last.position, last.emitted, last.ended_by) == (12, 5, "limit")


def test_tokens_that_no_round_accounts_for_are_counted() -> None:
    assert undrafted(Decoded("p", [8] * 10, "length", [4, 4], [2, 2])) == 3
    assert undrafted(Decoded("p", [8], "length", [], [])) == 0


def test_engine_means_the_witness_of_an_evaluation() -> None:
    config = compose_eval(["drafts=[a]", "engine=vllm", "witness.python=~/env/bin/python"])
    assert config.witness.engine == "vllm"
    assert config.witness.python == str(Path.home() / "env/bin/python")
    assert compose_eval([]).witness.engine is None


def test_more_arguments_of_the_engine_can_be_given() -> None:
    config = compose_eval(["drafts=[a]", "engine=vllm", "witness.arguments={gpu_memory_utilization:0.5}"])
    assert config.witness.arguments == {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=vllm"], "engine=vllm needs drafts, and there are none. Add drafts=[DRAFT]."),
        (["engine=ddp", "drafts=[a]"], "witness.engine: got 'ddp'; valid: 'vllm'."),
        (
            ["engine=vllm", "drafts=[a]", "schedule=threshold"],
            "engine=vllm verifies whole blocks, and schedule 'threshold' does not. Use schedule=full.",
        ),
        (
            ["engine=vllm", "drafts=[a]", "sampling.min_p=0.1"],
            "engine=vllm has no min_p beside drafts, and sampling.min_p is 0.1. Use sampling.min_p=0.",
        ),
        (["engine=vllm", "drafts=[a]", "witness.timeout_seconds=0"], "witness.timeout_seconds: got 0"),
    ],
)
def test_what_a_witness_cannot_do_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_eval(words)
    assert message in str(caught.value)


def test_only_a_difference_beyond_chance_and_tokens_without_a_draft_are_doubted() -> None:
    assert remarks([ROW], {}) == []
    apart = ROW.model_copy(update={"difference_ci95": (-0.5, -0.1)})
    plain = ROW.model_copy(update={"undrafted_tokens": 7})
    found = remarks([apart, plain], {"dspark": "no engine reads it."})
    assert len(found) == 3
    assert found[0].startswith("gsm8k, eagle3, temperature 0: the two taus differ")
    assert "7 tokens without a draft" in found[1]
    assert found[2] == "dspark was not measured by vLLM: no engine reads it."


def test_the_page_and_the_file_say_both_numbers_and_how_they_were_made(tmp_path: Path) -> None:
    sampled = ROW.model_copy(update={"temperature": 1.0, "same_answers": None, "same_rounds": None})
    section = witness_section([ROW, sampled], {"dspark": "no engine reads it."}, "vLLM 0.32.0 on cpu")
    first, second = section.rows
    assert len(first) == len(second) == len(section.head)
    assert first[3:9] == [
        "2.000 [1.800, 2.200]",
        "1.980 [1.780, 2.180]",
        "-0.020 [-0.050, +0.010]",
        "1.990",
        "100 / 101",
        "9 of 9",
    ]
    assert second[8:10] == ["-", "-"]
    assert "dspark was not measured by vLLM: no engine reads it." in section.note
    path = write_witness(tmp_path, [ROW], {"dspark": "why"}, {"target": "x"})
    content = json.loads(path.read_text())
    assert WitnessRow.model_validate(content["rows"][0], strict=False) == ROW
    assert content["not_measured"] == {"dspark": "why"}
    assert set(content["how"]) >= {"here", "witness", "witness_own_count"}
