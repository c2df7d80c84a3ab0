"""One optimizer step on tensors without data, with every byte counted.

The target, the draft, the batch and the training step are the real ones. Token ids, positions and masks are real as
well, because sizes follow from them; everything that is computed from weights is PyTorch's fake tensors, which have a
shape, a dtype and a lifetime but no memory. So the estimate follows the code, whatever the code becomes.

Operators are those of a CPU: the kernels of a GPU differ in small temporaries. Where the run has a GPU, chunks of the
head are as large as there, and attention of blocks keeps what flex attention keeps unless another form is asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec import attention, lookup, losses
from deepspec.algorithms.base import DraftModel, VocabMap, spec_of
from deepspec.algorithms.initial import copied_layers
from deepspec.config import TrainConfig
from deepspec.data.chat import TokenSample
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.planning.ledger import (
    ACTIVATIONS,
    BACKWARD,
    FEATURES,
    GRADIENTS,
    MASTERS,
    MOMENTS,
    PROBE,
    TARGET,
    TARGET_PASS,
    Ledger,
)
from deepspec.planning.sources import cache_lacks_normalisers, holds_layers, planned_source
from deepspec.targets.base import Target
from deepspec.targets.loading import model_options, text_body
from deepspec.types import TokenBatch


class StepShape(NamedTuple):
    """The sizes of one micro-batch.

    Attributes:
        batch: B, sequences.
        length: tokens of each.
        answer: generated tokens of each, the last ones.
        num_anchors: the most blocks of each in one forward.
    """

    batch: int
    length: int
    answer: int
    num_anchors: int


class Parameters(NamedTuple):
    """How many weights multiply what, in numbers of weights.

    Attributes:
        trainable: all that the optimizer updates.
        layers: matrices of the draft's layers.
        context: key and value matrices of the draft's layers.
        fc: the matrix that reads the features.
        width: heads x head size of a draft layer.
        num_layers: of the draft.
        hidden: H.
        vocab: V.
        draft_vocab: Vd.
        target: matrices of the target's layers.
        target_width: heads x head size, summed over the target's layers.
        taps: M.
        needs_log_normaliser: whether the training runs the target's whole head over the answers.
    """

    trainable: int
    layers: int
    context: int
    fc: int
    width: int
    num_layers: int
    hidden: int
    vocab: int
    draft_vocab: int
    target: int
    target_width: int
    taps: int
    needs_log_normaliser: bool


class Memory(NamedTuple):
    """Tensor bytes of a step.

    Attributes:
        peak: the most that is held at once.
        parts: what the peak consists of.
        phase: when it comes: `target pass`, `forward` or `backward`.
        static: target, masters, gradients and optimizer moments, held throughout.
        phases: what the peak of each phase consists of.
    """

    peak: int
    parts: dict[str, int]
    phase: str
    static: int
    phases: dict[str, dict[str, int]]

    @classmethod
    def of(cls, phases: dict[str, dict[str, int]], static: int) -> Memory:
        """The memory of a step whose phases hold this much at their peaks."""
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        return cls(sum(phases[phase].values()), phases[phase], phase, static, phases)


class DryRun:
    """A target and a draft without data, for any number of measured steps."""

    def __init__(self, config: TrainConfig, target_config: PreTrainedConfig) -> None:
        """Build both models.

        Args:
            config: the run.
            target_config: sizes of the target.

        Raises:
            ConfigError: taps, mask token or vocabulary do not fit the target.
            TargetError: the target is not a plain decoder, or no layers of its family are known.
        """
        self._config = config
        self._ledger = Ledger()
        with self._ledger:
            self._target, self._target_matrices, self._target_width = self._made_target(target_config)
            with self._ledger.phase(MASTERS):
                self._draft = self._made_draft().train()
            if config.evaluation.every_steps is not None:
                with self._ledger.phase(PROBE), _default_dtype(self._target.dtype):
                    self._probe = self._made_draft()
            trainable = [parameter for parameter in self._draft.parameters() if parameter.requires_grad]
            self._ledger.know_weights([*trainable, self._target.head.weight, self._draft.draft_head_weight])
            with self._ledger.phase(GRADIENTS):
                for parameter in trainable:
                    parameter.grad = torch.empty_like(parameter)
            with self._ledger.phase(MOMENTS):
                self._moments = [torch.empty_like(parameter) for parameter in trainable for _ in range(2)]
        self._trainable = trainable

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the trained weights, in their order."""
        return [tuple(parameter.shape) for parameter in self._trainable]

    @property
    def parameters(self) -> Parameters:
        """Sizes of both models."""
        draft, target = self._draft, self._target
        layers = list(draft.get_submodule("layers").children())
        projections = [part for layer in layers for part in layer.get_submodule("self_attn").named_children()]
        context = sum(_matrices(part) for name, part in projections if name in ("k_proj", "v_proj"))
        makes_normalisers = self._config.features.source == "online" or cache_lacks_normalisers(self._config)
        return Parameters(
            trainable=sum(parameter.numel() for parameter in self._trainable),
            layers=sum(_matrices(layer) for layer in layers),
            context=context,
            fc=_matrices(draft.get_submodule("fc")),
            width=_width(layers[0]),
            num_layers=len(layers),
            hidden=target.hidden_size,
            vocab=target.vocab_size,
            draft_vocab=draft.draft_head_weight.shape[0],
            target=self._target_matrices,
            target_width=self._target_width,
            taps=len(target.layer_ids),
            needs_log_normaliser=draft.needs_log_normaliser and makes_normalisers,
        )

    def measure(
        self, shape: StepShape, *, checkpoints_gradients: bool | None = None, overlaps: bool | None = None
    ) -> Memory:
        """Run target pass, forward and backward of one micro-batch; gradients and moments are there already.

        Args:
            shape: of the micro-batch.
            checkpoints_gradients: instead of what the run says.
            overlaps: whether the target runs over the next micro-batch meanwhile, instead of what the run says.
        """
        engine = self._config.engine
        is_on_gpu = engine.device != "cpu"
        overlaps = self._config.features.overlaps if overlaps is None else overlaps
        tokens = self._micro_batch(shape)
        two = [tokens, tokens._replace(sample_index=tokens.sample_index.clone())]
        plan = self._draft.slot_plan(tokens)
        wanted = engine.gradient_checkpointing if checkpoints_gradients is None else checkpoints_gradients
        self._draft.checkpoints_gradients = wanted
        self._draft.attention_form = engine.attention
        self._ledger.length = shape.length
        self._ledger.vocab_rows = self._draft.draft_head_weight.shape[0]
        static = self._ledger.total
        peaks: dict[str, tuple[int, dict[str, int]]] = {}
        with _as_on_a_gpu(self._draft) if is_on_gpu else nullcontext(), self._ledger:
            self._ledger.restart()
            with self._ledger.phase(TARGET_PASS):
                source = planned_source(
                    self._config,
                    self._target,
                    two,
                    needs_log_normaliser=self._draft.needs_log_normaliser,
                    overlaps=overlaps,
                )
                batch = source.complete(tokens)._replace(plan=plan)
            if is_on_gpu and self._config.features.source == "cached":
                self._ledger.restart()  # it was put together in the host's memory
            self._ledger.rename(TARGET_PASS, FEATURES)
            # Streams share no memory: what a pass beside the draft's step needs is taken all the time.
            beside = self._ledger.peak - self._ledger.total if overlaps and is_on_gpu else 0
            peaks["target pass"] = self._ledger.restart()
            with (
                self._ledger.phase(ACTIVATIONS),
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=engine.precision == "bf16"),
            ):
                coefficients = {name: torch.ones(()) for name in self._draft.loss_weights}
                objective = self._draft(batch, coefficients).objective
            peaks["forward"] = self._ledger.restart()
            with self._ledger.phase(BACKWARD):
                if engine.num_processes > 1:
                    # As the trainer's last micro-batch, so that every parameter has a gradient.
                    objective = objective + 0.0 * torch.stack([one.sum() for one in self._trainable]).sum()
                objective.backward()
            peaks["backward"] = self._ledger.restart()
            del batch, objective, source
        if beside:
            for name in ("forward", "backward"):
                peak, parts = peaks[name]
                peaks[name] = (peak + beside, {**parts, TARGET_PASS: beside})
        return Memory.of({name: parts for name, (_, parts) in peaks.items()}, static)

    def _micro_batch(self, shape: StepShape) -> TokenBatch:
        """The first micro-batch of equal sequences, of the loader's own making."""
        data, sets = self._config.data, self._config.anchor_sets
        is_answer = [position >= shape.length - shape.answer for position in range(shape.length)]
        sample = TokenSample("", [0] * shape.length, is_answer)
        limits = BatchLimits(
            global_batch_size=shape.batch,
            micro_batch_size=shape.batch,
            max_tokens=data.max_tokens_per_batch,
            max_anchors=data.max_anchors_per_batch,
            anchor_sets=sets,
        )
        loader = BatchLoader(
            [sample] * shape.batch, limits=limits, num_anchors=shape.num_anchors * sets, seed=0, pad_token_id=0
        )
        return next(loader.steps()).micro_batches[0]

    def _made_target(self, target_config: PreTrainedConfig) -> tuple[Target, int, int]:
        """What a process of the run holds of the target, and matrices and width of all its layers."""
        settings = self._config.target
        with self._ledger.phase(TARGET):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                target_config, **model_options(settings)
            )
        target = Target(
            model, None, name=settings.name_or_path, layer_ids=settings.layers, mask_token_id=settings.mask_token_id
        )
        bodies = [target.layer(index) for index in range(target.num_layers)]
        matrices, width = sum(map(_matrices, bodies)), sum(map(_width, bodies))
        if not holds_layers(self._config):
            # As targets/head_only.py: beside embedding, norm and head one layer, without which no decoder is made.
            del bodies, text_body(model, target.name).layers[1:]
            gc.collect()
        return target, matrices, width

    def _made_draft(self) -> DraftModel:
        algorithm, target = self._config.algorithm, self._target
        if algorithm.init == "target_layers":
            copied_layers(algorithm, target)  # refuses layers that the target does not have
        vocab = None
        if algorithm.draft_vocab_size is not None:
            # Which tokens it holds changes no size; without answers they are the lowest ids.
            vocab = VocabMap.from_answers((), algorithm.draft_vocab_size, target.vocab_size, target.stop_token_ids)
        # Not by make_draft: weights that the ledger watches cannot be moved, not even to where they are.
        module = lookup.load_module("algorithms", algorithm.name, "algorithm")
        draft: DraftModel = module.Draft(algorithm, spec_of(algorithm, target), target, vocab)
        return draft


class _FlexLike(torch.autograd.Function):
    """Makes and keeps what flex attention makes and keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(source) for source in ctx.saved_tensors[:3])


def _attend_flexibly(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor, size: int, length: int, scale: float
) -> Tensor:
    attended: Tensor = _FlexLike.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous()


@contextmanager
def _as_on_a_gpu(draft: DraftModel) -> Iterator[None]:
    """Make the choices that depend on the device as on a GPU, although the traced tensors say that it is a CPU."""
    if draft.attention_form == "auto":
        draft.attention_form = "flex"
    sizes = {
        "CPU_CHUNK_BYTES": losses.DEVICE_CHUNK_BYTES,
        "CPU_TILE_BYTES": losses.DEVICE_TILE_BYTES,
        "tile_threads": lambda: 1,
    }
    with _replaced(losses, sizes), _replaced(attention, {"attend_flexibly": _attend_flexibly, "MOST_SLICES": 1}):
        yield


@contextmanager
def _replaced(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    before = {name: vars(module)[name] for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _matrices(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)


def _width(layer: torch.nn.Module) -> int:
    """Heads x head size of a decoder layer."""
    return int(layer.get_parameter("self_attn.o_proj.weight").shape[1])
