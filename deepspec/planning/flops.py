"""How much arithmetic a training step asks for, in closed form.

Only what the mathematics needs is counted: keys that a query may see, teacher logits once for each position, and of the
frozen head's gradients the one of the hidden states. A product of [a, b] by [b, c] is 2abc operations.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspec.config import AnyAlgorithmConfig, DFlashConfig, DSparkConfig, Eagle3Config
from deepspec.planning.dryrun import Parameters

TARGET_PASS = "target pass"
_FORWARD, _FORWARD_AND_BACKWARD = 2, 6
_WITHOUT_INPUT_GRADIENT = 4  # features are given, so nothing flows back into them


class SequenceCounts(NamedTuple):
    """What one sequence holds, on average.

    Attributes:
        length: tokens.
        answer: generated tokens, the last ones.
        sets: forwards of the draft for each run of the target.
        anchors: blocks drawn from it for one forward.
        rows: supervised slots of these blocks.
        positions: different target positions that teach them.
    """

    length: int
    answer: int
    sets: int
    anchors: int
    rows: float
    positions: float


def count_sequence(length: int, answer: int, num_anchors: int, num_draft_tokens: int, sets: int = 1) -> SequenceCounts:
    """Expected counts of a sequence that ends with one answer, its anchors drawn without replacement.

    Args:
        length: tokens of prompt and answer.
        answer: tokens of the answer.
        num_anchors: the most anchors of a forward.
        num_draft_tokens: K.
        sets: forwards that share one run of the target, each with anchors of its own.
    """
    eligible = answer - 1
    drawn = min(num_anchors * sets, eligible)
    sets = max(1, -(-drawn // num_anchors))  # as the loader: no more sets than there are anchors for
    anchors = -(-drawn // sets)
    # The anchor with i answer tokens behind it supervises min(K, i) slots.
    slots = sum(min(num_draft_tokens, behind) for behind in range(1, answer))
    rows = anchors * slots / eligible
    share = anchors / eligible
    # A position teaches if one of the K anchors that reach it was drawn; the first ones are reached by fewer.
    positions = sum(1.0 - (1.0 - share) ** min(num_draft_tokens, place) for place in range(1, answer))
    return SequenceCounts(length, answer, sets, anchors, rows, min(positions, rows))


def sequence_flops(
    algorithm: AnyAlgorithmConfig, sizes: Parameters, counts: SequenceCounts, *, checkpoints_gradients: bool = False
) -> dict[str, float]:
    """Operations for one sequence, forward and backward, by part.

    Args:
        algorithm: the draft's settings.
        sizes: of draft and target.
        counts: of the sequence.
        checkpoints_gradients: the layers run forward a second time.
    """
    block = algorithm.num_draft_tokens
    # Anchors lie in the answer, so a block sees the prompt and on average half of the answer.
    seen = counts.length - counts.answer / 2
    if not isinstance(algorithm, Eagle3Config):
        inputs = block + (1 if isinstance(algorithm, DFlashConfig) and algorithm.layout == "fill_in" else 0)
        rows = float(counts.anchors * inputs)
        keys = rows * (seen + inputs)
        context = float(_FORWARD_AND_BACKWARD * sizes.context * counts.length)
    else:
        # The first step runs over the whole sequence, later ones from the anchors, with one more key in each step.
        later = float(counts.anchors * (block - 1))
        rows = counts.length + later
        keys = counts.length**2 / 2 + later * (seen + block / 2)
        context = 0.0
    head_product = 2.0 * sizes.hidden * sizes.draft_vocab
    teacher = head_product * counts.positions
    if sizes.needs_log_normaliser:
        teacher += 2.0 * sizes.hidden * sizes.vocab * counts.answer
    parts = {
        "draft layers": _FORWARD_AND_BACKWARD * sizes.layers * rows,
        "context (fc, keys, values)": _WITHOUT_INPUT_GRADIENT * sizes.fc * counts.length + context,
        "draft attention": 2.0 * _FORWARD_AND_BACKWARD * sizes.width * sizes.num_layers * keys,
        "head: draft logits": head_product * counts.rows,
        "head: gradient of hidden states": head_product * counts.rows,
        "head: teacher, once a position": teacher,
    }
    if checkpoints_gradients:
        parts["draft layers, run again"] = (parts["draft layers"] + parts["draft attention"]) / 3
    if isinstance(algorithm, DSparkConfig) and algorithm.markov_rank:
        rank = algorithm.markov_rank
        # Gates and memories look at every slot of a block, supervised or not.
        gates = {"vanilla": 0, "gated": rank * (sizes.hidden + rank), "rnn": 3 * rank * (sizes.hidden + 2 * rank)}
        product = rank * sizes.draft_vocab * counts.rows + gates[algorithm.markov_head] * rows
        parts["head: Markov bias"] = _FORWARD_AND_BACKWARD * product
    if isinstance(algorithm, Eagle3Config) and algorithm.own_head:
        parts["head: gradient of its weights"] = head_product * counts.rows
    parts = {name: counts.sets * amount for name, amount in parts.items()}
    parts[TARGET_PASS] = _FORWARD * (sizes.target * counts.length + sizes.target_width * counts.length**2)
    return parts
