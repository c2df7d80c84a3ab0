"""Packed samples are the samples, in a tenth of the room."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

from chat_targets import ascii_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from deepspec.config import compose_train
from deepspec.data.chat import TokenSample
from deepspec.data.packed import PackedSamples
from deepspec.data.samples import AnswerRuns, read_token_samples

TOKENS = st.tuples(st.integers(0, 2**31 - 1), st.booleans())
SAMPLES = st.lists(
    st.tuples(st.text(max_size=4), st.lists(TOKENS, max_size=9)).map(
        lambda pair: TokenSample(pair[0], [token for token, _ in pair[1]], [bit for _, bit in pair[1]])
    ),
    max_size=6,
)


@given(SAMPLES, st.slices(6))
def test_packed_samples_read_as_the_list_that_they_were_made_of(samples: list[TokenSample], part: slice) -> None:
    packed = PackedSamples(samples)
    assert list(packed) == samples
    assert [packed[index] for index in range(-len(samples), len(samples))] == samples * 2
    assert list(packed[part]) == samples[part]
    for sample in packed:
        assert {type(token) for token in sample.input_ids} <= {int}
        assert {type(bit) for bit in sample.answer_mask} <= {bool}


def test_a_token_takes_five_bytes() -> None:
    draw = random.Random(0)
    tracemalloc.start()
    try:
        packed = PackedSamples(
            TokenSample(str(number), [draw.randrange(300, 150_000) for _ in range(500)], [True] * 500)
            for number in range(200)
        )
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert packed.nbytes == 5 * 100_000
    # Arrays that grow have some room to spare, and every sample has a name.
    assert held < 1.2 * packed.nbytes + 200 * 100


def test_the_samples_of_an_answers_file_are_held_packed(tmp_path: Path) -> None:
    rows, length = 150, 2000
    path = tmp_path / "answers.jsonl"
    with path.open("w") as file:
        for number in range(rows):
            ids = list(range(300, 300 + length))
            file.write(json.dumps({"id": str(number), "prompt_ids": [ids[:50]], "answer_ids": [ids[50:]]}) + "\n")
    tokenizer = ascii_tokenizer()
    settings = compose_train(["experiment=dspark_smollm2_135m", "data.max_length=4096"]).data
    tracemalloc.start()
    try:
        samples, counts = read_token_samples(path, tokenizer, settings, enable_thinking=False, system_prompt=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(samples), counts.answer_tokens) == (rows, rows * (length - 50))
    # Beside them, one row as text, as JSON and as a sample, and arrays that move as they grow.
    assert peak < 2.5 * 5 * rows * length + 200 * length


def test_answer_runs_are_the_supervised_stretches_each_time_they_are_gone_through() -> None:
    first = TokenSample("a", [1, 2, 3, 4, 5], [False, True, True, False, True])
    runs = AnswerRuns(PackedSamples([first, TokenSample("b", [6, 7], [False, True])]))
    assert list(runs) == list(runs) == [[2, 3], [5], [7]]
