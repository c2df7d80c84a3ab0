from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from deepspec.command import check_command_line
from deepspec.config import (
    compose_eval,
    compose_train,
    config_folder,
    default_position_decay,
    short_name,
)
from deepspec.errors import ConfigError

CONFIG = config_folder()
ALGORITHMS = ["dflash", "dspark", "eagle3"]


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIG / group).glob("*.yaml"))


def refusal(compose, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def target_overrides(name: str) -> list[str]:
    own = ["target.name_or_path=/models/mine", "target.mask_token_id=5"] if name == "auto" else []
    return [f"target={name}", *own]


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes_and_is_named_after_its_algorithm_and_target(name: str):
    config = compose_train([f"experiment={name}"])
    algorithm, target = name.split("_", 1)
    assert config.algorithm.name == algorithm.replace("dspark5", "dspark")
    assert config.target.short_name == target
    block = 5 if algorithm == "dspark5" else 7
    assert config.run_name == f"{config.algorithm.name}_block{block}_{target}"


def test_every_algorithm_has_an_experiment_on_every_target():
    pairs = {f"{algorithm}_{target}" for algorithm in ALGORITHMS for target in choices("target") if target != "auto"}
    assert pairs | {"dspark5_qwen3_4b"} == set(choices("experiment"))


@pytest.mark.parametrize("name", choices("experiment"))
def test_first_comment_of_every_experiment_is_the_command_that_runs_it(name: str):
    comments = [
        line.removeprefix("#").strip()
        for line in (CONFIG / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        # Hydra reads @package on the first line only; it is a directive, not a comment.
        if line.startswith("#") and "@package" not in line
    ]
    assert comments[0] == f"python train.py experiment={name}"


@pytest.mark.parametrize("algorithm", choices("algorithm"))
@pytest.mark.parametrize("target", choices("target"))
def test_every_algorithm_composes_with_every_target(algorithm: str, target: str):
    config = compose_train([f"algorithm={algorithm}", *target_overrides(target)])
    assert config.algorithm.name == algorithm


@pytest.mark.parametrize("group", ["features", "data", "engine", "optimizer", "logger", "debug"])
def test_every_choice_of_every_training_group_composes(group: str):
    for name in choices(group):
        compose_train([f"{group}={name}"])


@pytest.mark.parametrize("name", choices("task"))
def test_every_task_composes_and_is_named_after_its_file(name: str):
    assert [task.name for task in compose_eval([f"task={name}"]).tasks] == [name]


@pytest.mark.parametrize("name", choices("suite"))
def test_every_suite_composes_to_the_tasks_that_it_names(name: str):
    names = yaml.safe_load((CONFIG / "suite" / f"{name}.yaml").read_text(encoding="utf-8"))["tasks"]
    assert [task.name for task in compose_eval([f"suite={name}"]).tasks] == names


@pytest.mark.parametrize("target", choices("target"))
def test_evaluation_composes_for_every_target(target: str):
    assert compose_eval(target_overrides(target)).drafts == ()


def test_paper_values_are_the_defaults():
    config = compose_train(["experiment=dspark_qwen3_4b"])
    algorithm, optimizer = config.algorithm, config.optimizer
    assert (algorithm.num_draft_tokens, algorithm.num_layers, algorithm.markov_rank) == (7, 5, 256)
    assert algorithm.position_decay == 4.0
    assert algorithm.losses.model_dump() == {"ce": 0.1, "tv": 0.9, "soft_ce": 0.0, "confidence": 1.0}
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.warmup_share) == (6e-4, 0.0, 0.04)
    assert (optimizer.clip_norm, optimizer.global_batch_size, optimizer.epochs) == (1.0, 512, 10)
    assert (config.data.max_length, config.data.num_anchors) == (4096, 512)
    assert config.target.mask_token_id == 151669


def test_gemma_has_its_own_taps_and_mask_token_and_layers():
    config = compose_train(["experiment=dspark_gemma4_12b"])
    assert config.target.layers == (5, 17, 29, 41, 46)
    assert config.target.mask_token_id == 4
    assert config.algorithm.draft_layers == "target"


@pytest.mark.parametrize(
    ("block", "decay"), [(1, 4.0), (5, 4.0), (7, 4.0), (8, 4.0), (9, 5.0), (12, 5.0), (13, 7.0), (15, 7.0), (31, 7.0)]
)
def test_position_decay_is_that_of_the_nearest_published_block(block: int, decay: float):
    assert default_position_decay(block) == decay
    assert compose_train([f"algorithm.num_draft_tokens={block}"]).algorithm.position_decay == decay


def test_position_decay_that_is_given_is_kept():
    assert compose_train(["algorithm.position_decay=7"]).algorithm.position_decay == 7.0


def test_debug_tiny_cuts_any_experiment_down():
    config = compose_train(["experiment=eagle3_qwen3_8b", "debug=tiny", "engine=ddp", "engine.num_processes=3"])
    assert (config.optimizer.steps, config.optimizer.epochs, config.optimizer.global_batch_size) == (4, None, 3)


def test_home_is_expanded_in_every_path():
    config = compose_train(["data.answers=~/a.jsonl"])
    assert config.data.answers == str(Path("~/a.jsonl").expanduser())
    assert config.run_dir == Path("~/checkpoints/deepspec/dspark_block7_qwen3_4b").expanduser()


def test_home_is_understood_in_lists_of_drafts():
    home = Path.home()
    assert compose_eval(["drafts=[~/a,~/b/c]"]).drafts == (f"{home}/a", f"{home}/b/c")


def test_configuration_cannot_be_changed_after_it_was_checked():
    config = compose_train([])
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1


def test_short_name_is_the_last_part_of_an_id_or_path():
    assert short_name("Qwen/Qwen3-4B") == "qwen3_4b"
    assert short_name("/models/My Model/") == "my_model"
    assert compose_train(target_overrides("auto")).target.short_name == "mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm=dsprk"],
            "algorithm 'dsprk' does not exist. Available: dflash, dspark, eagle3. Did you mean 'dspark'?",
        ),
        (["debug=tny"], "debug 'tny' does not exist. Available: none, tiny. Did you mean 'tiny'?"),
        (
            ["engine=ddp", "engine.num_processes=3", "optimizer.micro_batch_size=2"],
            "optimizer.global_batch_size 512 is not divisible by 3 processes x micro batch 2 = 6. Nearest: 510, 516.",
        ),
        (
            ["features.anchors_per_target_pass=700"],
            "features.anchors_per_target_pass 700 is no multiple of data.num_anchors 512. Try 512.",
        ),
        (
            ["algorithm=eagle3", "algorithm.normalise=sequence", "features.anchors_per_target_pass=1024"],
            "algorithm.normalise=sequence with features.anchors_per_target_pass 1024: a sequence would weigh once "
            "for each set that holds an anchor of it. Set features.anchors_per_target_pass=null, or "
            "algorithm.normalise=token.",
        ),
        (
            ["optimizer.global_batch_size=1", "optimizer.micro_batch_size=4"],
            "optimizer.global_batch_size 1 is not divisible by 1 processes x micro batch 4 = 4. Nearest: 4.",
        ),
        (
            ["algorithm.markov_head=rn"],
            "algorithm.markov_head: got 'rn'; valid: 'vanilla', 'gated' or 'rnn'. Did you mean 'rnn'?",
        ),
        (
            ["algorithm.num_draft_tokens=0"],
            "algorithm.num_draft_tokens: got 0; it should be greater than or equal to 1.",
        ),
        (
            ["algorithm=dflash", "algorithm.layout=fill_in", "algorithm.num_draft_tokens=0"],
            "algorithm.num_draft_tokens: got 0; it should be greater than or equal to 1.",
        ),
        (["seed=abc"], "seed: got 'abc'; it should be a valid integer."),
        (
            ["optimizer.steps=5"],
            "optimizer: epochs 10 and steps 5 are both given. Set exactly one and the other to null.",
        ),
        (["optimizer.epochs=null"], "optimizer: neither epochs nor steps is given. Set exactly one of them."),
        (
            ["target.layers=[-2,1]"],
            "target.layers [-2, 1]: there is no layer -2; use -1 for the embeddings, 0.. for decoder layers",
        ),
        (["target.layers=[3,1]"], "target.layers [3, 1]: must rise strictly, but 1 follows 3; try [1, 3]"),
        (["target.layers=[1,1]"], "target.layers [1, 1]: must rise strictly, but 1 follows 1; try [1]"),
        (
            ["algorithm.confidence_head=false"],
            "algorithm: losses.confidence is 1, but confidence_head is false. "
            "Set losses.confidence=0 or confidence_head=true.",
        ),
        (
            ["engine.num_processes=2"],
            "engine: num_processes is 2, but name 'single' runs one process. Use engine=ddp engine.num_processes=2.",
        ),
        (["algorithm=eagle3", "algorithm.num_layers=2"], "algorithm.num_layers: got 2; valid: 1."),
        (["target=auto"], "target.name_or_path must be given: target.name_or_path=<value>."),
        (
            ["target=auto", "target.name_or_path=/models/mine"],
            "algorithm 'dspark' fills the unknown slots of a block with target.mask_token_id, which is null for "
            "/models/mine. Set it to an id that the target never emits and that has an embedding row.",
        ),
        (["seed=1,2"], "seed has several values: 1,2. Add -m to run them one after another, or give one."),
        (
            ["data.max_length=7"],
            "data.max_length 7 cannot hold an anchor and algorithm.num_draft_tokens 7. Use data.max_length=8 or more.",
        ),
        (["algorithm.name=foo"], "algorithm.name: got 'foo'; valid: dspark, dflash, eagle3."),
        (["~algorithm.name"], "algorithm.name: must be given."),
        (
            ["optimizer=null"],
            "optimizer=null: a group needs one of its choices. python train.py --help lists them.",
        ),
        (
            ["exp_name=.."],
            "exp_name: got '..'; it should match pattern '^[A-Za-z0-9_=-][A-Za-z0-9._=-]*$'.",
        ),
        (["optimizer.betas=[0.9,1.0]"], "optimizer.betas.1: got 1.0; it should be less than 1."),
        ([f"seed={2**63}"], f"seed: got {2**63}; it should be less than {2**63}."),
        (["exp_name=12"], "exp_name: got 12; it should be a valid string."),
    ],
)
def test_wrong_training_setting_is_refused_with_path_value_and_way_out(overrides: list[str], message: str):
    assert refusal(compose_train, *overrides) == message


@pytest.mark.parametrize(
    ("overrides", "path", "meant"),
    [
        (["optimizer.learning_rat=1"], "optimizer.learning_rat", "optimizer.learning_rate"),
        (["optimizer.lr=1"], "optimizer.lr", "optimizer.learning_rate"),
        (["+optimizer.step=1"], "optimizer.step", "optimizer.steps"),
        (["algoritm=dspark"], "algoritm", "algorithm"),
        (["learning_rate=1"], "learning_rate", "optimizer.learning_rate"),
        (["algorithm=dflash", "algorithm.num_drafts_tokens=3"], "algorithm.num_drafts_tokens", "num_draft_tokens"),
        (["algorithm.losses.cee=1"], "algorithm.losses.cee", "algorithm.losses.ce"),
        (["experiments=dspark_qwen3_4b"], "experiments", "experiment"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_valid_one(overrides: list[str], path: str, meant: str):
    message = refusal(compose_train, *overrides)
    assert message.startswith(f"{path}: there is no such key.")
    assert f"{meant}'?" in message


def test_key_of_another_algorithm_is_refused_with_what_there_is():
    message = refusal(compose_train, "algorithm=eagle3", "algorithm.losses.ce=1")
    assert message == "algorithm.losses.ce: there is no such key. algorithm.losses has: soft_ce."


def test_bigram_start_is_refused_without_the_vanilla_head():
    message = refusal(compose_train, "algorithm.markov_init=bigram", "algorithm.markov_head=rnn")
    assert message.startswith("algorithm: markov_init 'bigram' needs markov_head 'vanilla', not 'rnn'")


def test_copied_layers_are_refused_for_layers_of_another_family():
    message = refusal(compose_train, "algorithm.init=target_layers")
    assert message.endswith("draft_layers is 'qwen3'. Set draft_layers=target or init=random.")


def test_losses_that_are_all_zero_are_refused():
    message = refusal(compose_train, "algorithm=dflash", "algorithm.losses.ce=0")
    assert message == (
        "algorithm.losses: ce, tv and soft_ce are all 0, so nothing trains the draft. Make one of them positive."
    )


def test_several_mistakes_are_named_together():
    message = refusal(compose_train, "seed=-1", "data.num_anchors=-2")
    assert "seed: got -1" in message
    assert "data.num_anchors: got -2" in message


def test_override_that_cannot_be_read_says_how_to_quote():
    assert "cannot be read as key=value" in refusal(compose_train, "data.answers=a b=c")


def test_infinite_and_wrongly_typed_numbers_are_refused():
    assert refusal(compose_train, "optimizer.learning_rate=inf").startswith("optimizer.learning_rate: got inf")
    assert refusal(compose_train, "optimizer.epochs=1.5").startswith("optimizer.epochs: got 1.5")
    assert refusal(compose_train, "logger.wandb=1").startswith("logger.wandb: got 1")


def test_task_takes_precedence_over_the_suite():
    config = compose_eval(["suite=paper", "task=gsm8k", "task.limit=5"])
    assert [(task.name, task.limit) for task in config.tasks] == [("gsm8k", 5)]


def test_own_prompts_need_one_override():
    (task,) = compose_eval(["task.path=folder/my.jsonl"]).tasks
    assert (task.name, task.source, task.path, task.template) == ("my", "file", "folder/my.jsonl", "{prompt}")


def test_tasks_of_a_suite_can_be_named_on_the_command_line():
    assert [task.name for task in compose_eval(["suite.tasks=[mbpp,gsm8k]"]).tasks] == ["mbpp", "gsm8k"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=gsm8"], "Did you mean 'gsm8k'?"),
        (["suite=papr"], "Did you mean 'paper'?"),
        (["suite.tasks=[gsm]"], "task 'gsm' does not exist."),
        (["suite.tasks=[]"], "suite.tasks is []; it must be a list of task names, such as [gsm8k, mbpp]."),
        (["task.template=x"], "task.template is 'x', but no task is chosen."),
        (["task.path=a.jsonl", "task.template=x"], "task.template x: has no {prompt}"),
        (["drafts=a"], "drafts: got 'a'; it should be a list, such as [a,b]."),
        (["task=gsm8k", "+task.limits=3"], "Did you mean 'task.limit'?"),
        (["task=gsm8k", "task.hub_split=null"], "task: source 'hub' needs hub_id and hub_split, or a local copy"),
        (["+suite.task=3"], "suite.task: there is no such key. suite has: tasks. Did you mean 'suite.tasks'?"),
        (["~suite"], "suite.tasks is None; it must be a list"),
        (["draft=a"], "Did you mean 'drafts'?"),
        (["sampling.temperature=-1"], "sampling.temperature: got -1"),
        (["sampling.top_p=0"], "sampling.top_p: got 0"),
        (["schedule=threshold", "schedule.threshold=2"], "schedule.threshold: got 2"),
        (["schedule=treshold"], "schedule 'treshold' does not exist. Available: asynchronous, fixed, full"),
        (["schedule=throughput"], "schedule.curve must be given: schedule.curve=<value>."),
        (["schedule=fixed", "schedule.windows=[[2,5]]"], "must begin with 1 request and ascend"),
        (["suite=null"], "a group needs one of its choices. python eval.py --help lists them."),
    ],
)
def test_wrong_evaluation_setting_is_refused(overrides: list[str], message: str):
    assert message in refusal(compose_eval, *overrides)


def test_every_job_of_a_sweep_is_checked_before_the_first_runs():
    check_command_line("train", ["-m", "algorithm=dspark,dflash,eagle3", "seed=1,2"])
    with pytest.raises(ConfigError, match="algorithm 'dfash' does not exist"):
        check_command_line("train", ["-m", "algorithm=dspark,dfash"])
    with pytest.raises(ConfigError, match=r"algorithm\.num_layers: got 2; valid: 1"):
        check_command_line("train", ["algorithm=dspark,eagle3", "algorithm.num_layers=2", "--multirun"])


def test_a_wrong_setting_is_refused_before_torch_is_loaded():
    code = (
        "import sys; from deepspec.config import compose_train; compose_train([]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONFIG.parent)


def test_a_wrong_task_is_not_called_a_missing_one_as_well():
    assert refusal(compose_eval, "task.path=x.jsonl", "task.limit=0") == (
        "task.limit: got 0; it should be greater than or equal to 1."
    )
    assert "tasks" in refusal(compose_eval, "suite.tasks=[]")


def test_the_best_loss_is_never_the_highest():
    words = ("experiment=dspark_smollm2_135m", "checkpoint.keep_best=loss/ce")
    assert "Use checkpoint.best_is=lowest" in refusal(compose_train, *words)
    assert compose_train([*words, "checkpoint.best_is=lowest"]).checkpoint.keep_best == "loss/ce"
