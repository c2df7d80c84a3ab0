"""Exports: what is written for whom, that it reads back to the same rounds, and what is refused with a way out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_targets import LAYERS, MASK_TOKEN, save_chat_target, target_overrides
from families import family_target
from helpers import batch_of, kind_of_draft, overfit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import (
    _same_weights,
    algorithm_of,
    checkpoint_config,
    load_draft,
    read_config,
    save_draft,
)
from deepspec.attention import GROUPED_SDPA
from deepspec.cli import main
from deepspec.errors import CheckpointError, ConfigError, DataError
from deepspec.evaluation.answers import weights_id
from deepspec.interop.engines import FORMATS, draft_facts, refusal, unserved
from deepspec.interop.export import run_export
from deepspec.interop.folder import read_state
from deepspec.interop.inspection import explain
from deepspec.interop.lint import lint
from deepspec.interop.settings import compose_export
from deepspec.interop.verification import check_rounds
from deepspec.scheduling.calibration import Calibration, calibration_path
from deepspec.targets.base import Target
from deepspec.targets.facts import TargetFacts

SERVED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "dspark": ("dspark-vanilla", {}, {"deepspec", "specforge", "vllm", "sglang", "speculators"}),
    "dspark_rnn": ("dspark-rnn", {}, {"deepspec", "specforge", "sglang", "speculators"}),
    "dspark_reduced": ("dspark-gated", {"draft_vocab_size": 60}, {"deepspec", "speculators"}),
    "anchor_first": ("dflash-anchor_first", {}, {"deepspec", "specforge", "vllm", "sglang", "speculators"}),
    "fill_in": ("dflash-fill_in", {}, set(FORMATS)),
    "eagle3": ("eagle3", {"draft_vocab_size": 60}, {"deepspec", "vllm", "speculators"}),
    "eagle3_own": ("eagle3-own_head", {"norm_before_residual": True}, {"deepspec", "vllm", "speculators"}),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(target_folder, attn_implementation=GROUPED_SDPA, dtype=torch.float32)
    return Target(model, None, name="tiny-chat", layer_ids=LAYERS, mask_token_id=MASK_TOKEN)


def _trained(target: Target, kind: str, **overrides: Any) -> DraftModel:
    target.tap(LAYERS)
    draft = kind_of_draft(target, kind, **overrides)
    overfit(draft, batch_of(target, [(list(range(5, 20)), list(range(20, 50)))]), steps=4)
    return draft.eval()


def _saved(folder: Path, draft: DraftModel) -> Path:
    folder.mkdir(parents=True)
    save_draft(draft, folder)
    return folder


def _export(draft: Path, target_folder: Path, output: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    overrides = [f"draft={draft}", f"output_dir={output}", "device=cpu", *target_overrides(target_folder), *words]
    folder = run_export(compose_export(overrides))
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", SERVED)
def test_every_format_that_can_hold_a_draft_decodes_to_the_same_rounds(
    name: str, target: Target, target_folder: Path, tmp_path: Path
) -> None:
    kind, overrides, served = SERVED[name]
    draft = _saved(tmp_path / "draft", _trained(target, kind, **overrides))
    for engine in FORMATS:
        output = tmp_path / engine
        if engine in served:
            _export(draft, target_folder, output, f"format={engine}", "verify=true", "verify_tokens=8")
            assert not [line for line in explain(output) if line.startswith("wrong")]
            assert "```" in (output / "README.md").read_text()
        else:
            with pytest.raises(ConfigError, match=r"cannot be exported with format=.*(Nearest|nearest)"):
                _export(draft, target_folder, output, f"format={engine}")
            assert not output.exists()


def test_a_target_that_an_engine_cannot_tap_is_refused_with_what_works(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dflash-fill_in"))
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | {"architectures": ["Glm4ForCausalLM"]}))
    for engine in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=r"cannot hand layers of Glm4ForCausalLM.*Nearest: format=zlab\.$"):
            _export(draft, other, tmp_path / engine, f"format={engine}")
        assert not (tmp_path / engine).exists()
    _export(draft, other, tmp_path / "zlab", "format=zlab")
    # A library's format can be written, but what would serve it cannot.
    block = _saved(tmp_path / "block", _trained(target, "dspark-vanilla"))
    for engine in ("speculators", "specforge"):
        _export(block, other, tmp_path / engine / "out", f"format={engine}")
        card = (tmp_path / engine / "out" / "README.md").read_text()
        assert "# No engine serves it: " in card
        assert "cannot hand layers of Glm4ForCausalLM" in card


def test_a_block_draft_beside_windows_is_served_in_the_runner_that_can(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    """vLLM's first model runner splits the draft's layers over groups of caches, and stops."""
    windowed = tmp_path / "windowed"
    shutil.copytree(target_folder, windowed)
    fields = json.loads((windowed / "config.json").read_text())
    kinds = ["sliding_attention" if index % 2 else "full_attention" for index in range(fields["num_hidden_layers"])]
    changed = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 8}
    (windowed / "config.json").write_text(json.dumps(fields | changed))
    starts = {}
    for kind in ("dflash-fill_in", "dspark-vanilla", "eagle3"):
        draft = _saved(tmp_path / kind, _trained(target, kind))
        for place in (target_folder, windowed):
            output = tmp_path / f"{kind}-{place.name}"
            _export(draft, place, output, "format=vllm")
            card = (output / "README.md").read_text()
            starts[kind, place is windowed] = "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve" in card
    assert {key for key, is_second in starts.items() if is_second} == {
        ("dflash-fill_in", True),
        ("dspark-vanilla", True),
        ("dspark-vanilla", False),
    }


def test_a_card_names_the_embedded_target_by_its_folder_where_others_read_it(
    target: Target, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(target_folder, cache / "SmolLM2-135M-Instruct")
    monkeypatch.setenv("DEEPSPEC_CACHE", str(cache))
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3"))
    for engine, name in (("vllm", str(cache / "SmolLM2-135M-Instruct")), ("deepspec", "smollm2-135m")):
        words = [f"draft={draft}", f"output_dir={tmp_path / engine}", "device=cpu", "target=smollm2_135m"]
        folder = run_export(compose_export([*words, f"format={engine}"]))
        command = {"vllm": f"vllm serve {name} ", "deepspec": f"target.name_or_path={name} "}[engine]
        assert command in (folder / "README.md").read_text()


def test_a_tied_head_is_written_beside_the_embedding(target: Target, tmp_path: Path) -> None:
    tied = save_chat_target(tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(tied, tie_word_embeddings=True)
    model.tie_weights()
    model.save_pretrained(tied)
    draft = _saved(tmp_path / "draft", _trained(target, "dspark-vanilla"))
    _, own = _export(draft, tied, tmp_path / "own", "format=vllm", "vocabulary=own")
    assert torch.equal(own["lm_head.weight"], own["embed_tokens.weight"])


def test_gemma4_layers_beside_a_text_only_gemma4_are_refused_for_vllm(tmp_path: Path) -> None:
    family = family_target("gemma4_text")
    draft = kind_of_draft(family, "dspark-vanilla", draft_layers="target")
    save_draft(draft, tmp_path)
    fields = read_config(tmp_path) | {"attention_k_eq_v": True}
    whole, alone = "Gemma4UnifiedForConditionalGeneration", "Gemma4ForCausalLM"
    facts = TargetFacts((alone,), 32, 100, 4, 5.6, 30.0, True)
    algorithm = algorithm_of(fields)
    why = refusal(draft_facts(fields, algorithm, facts), "vllm")
    assert why is not None
    assert re.search(r"Duplicate layer name.*Nearest: format=deepspec", why)
    assert refusal(draft_facts(fields, algorithm, facts._replace(architectures=(whole,))), "vllm") is None


def test_taps_are_written_as_each_reader_counts_them(target: Target, target_folder: Path, tmp_path: Path) -> None:
    block = _saved(tmp_path / "block", _trained(target, "dflash-fill_in"))
    eagle3 = _saved(tmp_path / "eagle3", _trained(target, "eagle3"))
    zlab, _ = _export(block, target_folder, tmp_path / "a", "format=zlab")
    assert zlab["dflash_config"] == {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1, 3]}
    assert (zlab["architectures"], zlab["block_size"]) == (["DFlashDraftModel"], 5)
    speculators, _ = _export(block, target_folder, tmp_path / "b", "format=speculators")
    assert speculators["aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert speculators["sample_from_anchor"] is False
    assert speculators["sliding_window_non_causal"] is True
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert speculators["speculators_config"]["verifier"] == {
        "name_or_path": str(target_folder),
        "architectures": ["Qwen3ForCausalLM"],
    }
    vllm, weights = _export(eagle3, target_folder, tmp_path / "c", "format=vllm")
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert vllm["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert (vllm["num_aux_hidden_states"], vllm["norm_before_residual"]) == (3, False)
    assert vllm["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert not {"d2t", "lm_head.weight", "embed_tokens.weight"} & weights.keys()
    # The speculators library needs both.
    _, weights = _export(eagle3, target_folder, tmp_path / "d", "format=speculators")
    assert torch.equal(weights["embed_tokens.weight"], target.head.embedding)
    assert torch.equal(weights["lm_head.weight"], target.head.weight)


def test_a_dflash_that_predicts_from_its_anchor_becomes_a_dspark_with_an_empty_head(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dflash-anchor_first"))
    for engine in ("vllm", "sglang"):
        fields, weights = _export(draft, target_folder, tmp_path / engine, f"format={engine}")
        assert fields["architectures"] == ["Qwen3DSparkModel"]
        assert (fields["markov_rank"], fields["markov_head_type"], fields["sample_from_anchor"]) == (1, "vanilla", True)
        assert fields["enable_confidence_head"] is False
        assert not weights["markov_head.markov_w1.weight"].any()
        assert not weights["markov_head.markov_w2.weight"].any()
    fields, weights = _export(draft, target_folder, tmp_path / "specforge", "format=specforge")
    assert fields["dflash_config"]["markov_rank"] == 1
    assert not weights["markov_head.markov_w1.weight"].any()


def test_vocabulary_weights_are_copied_where_asked_for_or_needed(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    full = _saved(tmp_path / "full", _trained(target, "dspark-vanilla"))
    reduced = _saved(tmp_path / "reduced", _trained(target, "dspark-vanilla", draft_vocab_size=60))
    _, shared = _export(full, target_folder, tmp_path / "a", "format=vllm")
    assert not {"embed_tokens.weight", "lm_head.weight"} & shared.keys()
    _, own = _export(full, target_folder, tmp_path / "b", "format=vllm", "vocabulary=own")
    assert torch.equal(own["embed_tokens.weight"], target.head.embedding)
    assert torch.equal(own["lm_head.weight"], target.head.weight)
    fields, rows = _export(reduced, target_folder, tmp_path / "c", "format=vllm")
    assert fields["draft_vocab_size"] == 60
    ids = rows["d2t"] + torch.arange(60)
    assert torch.equal(rows["lm_head.weight"], target.head.weight[ids])
    assert rows["d2t"].dtype == torch.int64


def test_rotary_is_written_in_both_schemas_and_target_only_keys_nowhere(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dspark-vanilla"))
    fields = json.loads((draft / "config.json").read_text())
    fields["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2]}
    alien = {"max_window_layers": 3, "quantization_config": {}, "auto_map": {}, "mrope_interleaved": True}
    alien |= {"partial_rotary_factor": 0.25}
    (draft / "config.json").write_text(json.dumps(fields | alien))
    assert any(line.startswith("wrong (target_keys)") for line in explain(draft))
    for engine in ("deepspec", "vllm", "sglang", "specforge", "speculators"):
        made, _ = _export(draft, target_folder, tmp_path / engine, f"format={engine}", "verify=true", "verify_tokens=4")
        text = json.dumps(made)
        assert not any(word in text for word in ("partial_rotary", "mrope", "max_window", "quantization", "auto_map"))
        inner = made.get("transformer_layer_config", made)
        assert inner["rope_parameters"]["rope_theta"] == 10000.0
        assert engine == "deepspec" or inner["rope_theta"] == 10000.0


def test_weights_are_rounded_where_asked(target: Target, target_folder: Path, tmp_path: Path) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3"))
    fields, weights = _export(draft, target_folder, tmp_path / "out", "format=vllm", "dtype=bfloat16", "verify=true")
    assert fields["dtype"] == "bfloat16"
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_an_untrained_or_damaged_draft_is_refused_and_nothing_is_left(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    target.tap(LAYERS)
    fresh = _saved(tmp_path / "fresh", kind_of_draft(target, "dspark-vanilla"))
    with pytest.raises(CheckpointError, match=r"norms are exactly 1: these weights were never trained"):
        _export(fresh, target_folder, tmp_path / "out", "format=vllm")
    _export(fresh, target_folder, tmp_path / "allowed", "format=vllm", "allow_untrained=true")
    broken = _trained(target, "dspark-vanilla")
    with torch.no_grad():
        broken.fc.weight[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights: fc\.weight"):
        _export(_saved(tmp_path / "broken", broken), target_folder, tmp_path / "out", "format=vllm")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    save_file(weights | {"fc.weight": torch.ones_like(weights["fc.weight"], dtype=torch.int8)}, tmp_path / "int8")
    (tmp_path / "int8").replace(tmp_path / "broken" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not real numbers: fc\.weight \(int8\)"):
        _export(tmp_path / "broken", target_folder, tmp_path / "out", "format=vllm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["allowed", "broken", "fresh"]


def test_a_folder_that_exists_and_a_disk_that_refuses_lose_nothing(
    target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"out exists\. Remove it"):
        _export(draft, target_folder, tmp_path / "out", "format=vllm")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    with pytest.raises(DataError, match="cannot be written"):
        _export(draft, target_folder, Path("/proc/deepspec/out"), "format=vllm")


def test_calibration_and_cost_go_along_for_sglang_alone(target: Target, target_folder: Path, tmp_path: Path) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dspark-vanilla"))
    sts = {"temperatures": [1.0, 0.9, 1.2, 0.8], "dataset": "held out", "num_samples": 7, "more": 1}
    (draft / "sglang_sts_head.json").write_text(json.dumps(sts))
    with pytest.raises(DataError, match=r"lies there without calibration_head\.json"):
        _export(draft, target_folder, tmp_path / "none", "format=sglang")
    for weights, problem in (("others", "other weights of this draft"), (weights_id(draft), None)):
        calibration = Calibration(source="head", temperatures=(1.0, 0.9, 1.2, 0.8), weights=weights, details={})
        calibration_path(draft, "head").write_text(calibration.model_dump_json())
        if problem is not None:
            with pytest.raises(DataError, match=problem):
                _export(draft, target_folder, tmp_path / "none", "format=sglang")
    assert not (tmp_path / "none").exists()
    (tmp_path / "cost.json").write_text(
        json.dumps({"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [40.0, 30.0], "max_batch_tokens": 8})
    )
    _export(draft, target_folder, tmp_path / "a", "format=sglang", f"cost={tmp_path / 'cost.json'}")
    assert json.loads((tmp_path / "a" / "sts.json").read_text()) == {k: v for k, v in sts.items() if k != "more"}
    table = json.loads((tmp_path / "a" / "sps_table.json").read_text())
    assert table == {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [40.0, 30.0], "max_batch_tokens": 8}
    card = (tmp_path / "a" / "README.md").read_text()
    assert "--speculative-dspark-confidence-sts-path" in card
    assert "--speculative-dspark-sps-table-path" in card
    _export(draft, target_folder, tmp_path / "b", "format=vllm")
    assert not (tmp_path / "b" / "sts.json").exists()
    with pytest.raises(ConfigError, match="format 'vllm' has no reader for it"):
        _export(draft, target_folder, tmp_path / "c", "format=vllm", "cost=x.json")
    (draft / "sglang_sts_head.json").write_text(json.dumps({"temperatures": [1.0, -1.0]}))
    with pytest.raises(DataError, match="temperatures must be 4 positive numbers"):
        _export(draft, target_folder, tmp_path / "d", "format=sglang")


def test_the_card_has_the_rows_of_this_draft(target: Target, target_folder: Path, tmp_path: Path) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3"))
    row = {
        "task": "gsm8k",
        "draft": "mine",
        "algorithm": "eagle3",
        "temperature": 0.0,
        "num_prompts": 12,
        "rounds": 90,
        "acceptance_length": 2.5,
        "acceptance_length_ci95": [2.25, 2.75],
        "survival": [0.5],
        "conditional_acceptance": [0.5],
        "acceptance_rate": 0.3,
        "speedup_over_autoregressive": 1.5,
    }
    others = row | {"draft": "other", "acceptance_length": 9.0}
    provenance = {"drafts": {"mine": str(draft), "other": "/elsewhere"}, "dtype": "float32", "device": "cpu"}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"schema": 1, "provenance": provenance, "rows": [row, others]}))
    _export(draft, target_folder, tmp_path / "a", "format=vllm", f"results={results}")
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| gsm8k | 0 | 2.50 [2.25, 2.75] | 1.50 | 12 | 1.50x |" in card
    assert "9.00" not in card
    # The hub refuses a folder there.
    assert "base_model" not in card
    results.write_text(json.dumps({"schema": 1, "provenance": {}, "rows": [others]}))
    with pytest.raises(DataError, match=r"tell nothing of .*draft; they have other \(of an unknown folder\)"):
        _export(draft, target_folder, tmp_path / "b", "format=vllm", f"results={results}")
    # Another step of the same run has the same name.
    provenance = {"drafts": {"draft": str(tmp_path / "step_1")}}
    results.write_text(json.dumps({"schema": 1, "provenance": provenance, "rows": [row | {"draft": "draft"}]}))
    with pytest.raises(DataError, match=r"they have draft \(.*step_1\)"):
        _export(draft, target_folder, tmp_path / "b", "format=vllm", f"results={results}")
    assert not (tmp_path / "b").exists()


def test_options_in_the_habit_of_other_tools_mean_the_same_overrides() -> None:
    short = compose_export(["runs/x/step_latest", "--format", "vllm", "--verify", "target=qwen3_4b", "--own"])
    plain = compose_export(
        ["draft=runs/x/step_latest", "format=vllm", "verify=true", "target=qwen3_4b", "vocabulary=own"]
    )
    assert short == plain
    assert compose_export(["a/b", "--format=zlab", "target=qwen3_4b"]).format == "zlab"
    with pytest.raises(ConfigError, match="--fromat: there is no such option"):
        compose_export(["a/b", "--fromat", "vllm"])
    with pytest.raises(ConfigError, match="--format needs a value"):
        compose_export(["a/b", "--format"])
    with pytest.raises(ConfigError, match=r"format: got 'vlm'; valid: .*Did you mean 'vllm'"):
        compose_export(["a/b", "format=vlm", "target=qwen3_4b"])


def test_the_commands_end_with_one_line_where_they_cannot_go_on(
    capsys: pytest.CaptureFixture[str], target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3"))
    for words, said in (
        (["inspect"], "takes one folder or hub id"),
        (["inspect", str(tmp_path / "none")], "no config.json"),
        (["export", str(draft), "format=zlab", *target_overrides(target_folder)], "z-lab's format holds DFlash only"),
        (["export", str(draft), "format=vllm"], "target.name_or_path must be given"),
        (["export", str(draft), "format=vllm", "target=auto", "target.name_or_path=/none"], "config of target '/none'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    main(["inspect", str(target_folder)])
    assert "a target model (Qwen3ForCausalLM, 5 layers" in capsys.readouterr().out


def test_a_draft_of_another_target_is_not_exported(target: Target, target_folder: Path, tmp_path: Path) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3"))
    fields = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(fields | {"num_target_layers": 36}))
    with pytest.raises(CheckpointError, match=r"num_target_layers 36, but .* has 5"):
        _export(draft, target_folder, tmp_path / "a", "format=vllm")
    (draft / "config.json").write_text(json.dumps(fields))
    other = tmp_path / "wider"
    shutil.copytree(target_folder, other)
    wider = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(wider | {"hidden_size": 2 * wider["hidden_size"]}))
    with pytest.raises(CheckpointError, match=rf"hidden_size {wider['hidden_size']}, but .* has "):
        _export(draft, other, tmp_path / "a", "format=vllm")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("damage", ["ids instead of offsets", "other marks"])
def test_maps_of_a_reduced_vocabulary_that_say_something_else_are_not_exported(
    damage: str, target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "eagle3", draft_vocab_size=60))
    state = load_file(draft / "model.safetensors")
    if damage == "other marks":
        state["t2d"] = state["t2d"].roll(1)
    else:
        state["d2t"] = state["d2t"] + torch.arange(len(state["d2t"]))
    save_file(state, draft / "model.safetensors")
    for engine in ("vllm", "deepspec"):
        with pytest.raises(CheckpointError, match="d2t and t2d are no draft vocabulary: d2t must hold offsets"):
            _export(draft, target_folder, tmp_path / engine, f"format={engine}")
    assert any(line.startswith("wrong (vocabulary)") for line in explain(draft))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_vocabulary_weights_are_recognised_in_every_precision(
    dtype: str, target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dspark-vanilla"))
    words = ("format=vllm", "vocabulary=own", f"dtype={dtype}")
    _export(draft, target_folder, tmp_path / "out", *words)
    load_draft(tmp_path / "out", target)
    # Steps of fp16 that bf16 does not know, and the other way round.
    fine = torch.randn(200, 32).mul_(0.02).bfloat16().float()
    for mine in (fine, fine.bfloat16(), fine.half()):
        assert _same_weights(fine.to(getattr(torch, dtype)), mine)
        assert not _same_weights(fine.to(getattr(torch, dtype)) * 1.1, mine)


def test_a_card_for_the_hub_names_nothing_of_this_machine(
    target: Target, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr("deepspec.interop.export.upload", lambda folder, name, private: sent.append(name))
    draft = _saved(tmp_path / "draft", _trained(target, "dspark-vanilla"))
    (tmp_path / "cost.json").write_text(
        json.dumps({"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [40.0, 30.0], "max_batch_tokens": 8})
    )
    for engine, more in (("sglang", [f"cost={tmp_path / 'cost.json'}"]), ("vllm", [])):
        _export(draft, target_folder, tmp_path / engine, f"format={engine}", "push_to=org/name", *more)
        card = (tmp_path / engine / "README.md").read_text()
        assert str(tmp_path) not in card
        assert str(target_folder) not in card
    # Tables are read from a folder.
    card = (tmp_path / "sglang" / "README.md").read_text()
    assert "hf download org/name --local-dir sglang\n" in card
    assert "--speculative-dspark-sps-table-path sglang/sps_table.json" in card
    with pytest.raises(ConfigError, match=r"nobody else has .*Name it by its hub id"):
        _export(draft, target_folder, tmp_path / "none", "format=speculators", "push_to=org/name")
    assert not (tmp_path / "none").exists()
    assert sent == ["org/name", "org/name"]


def test_what_is_nearest_can_be_written_and_is_served(target: Target) -> None:
    for kind, overrides in (
        ("dspark-gated", {"draft_vocab_size": 60}),
        ("dspark-gated", {}),
        ("dflash-anchor_first", {}),
        ("eagle3", {}),
    ):
        draft = kind_of_draft(target, kind, **overrides)
        facts = draft_facts(checkpoint_config(draft), draft.config, None)
        for engine in FORMATS:
            why = refusal(facts, engine)
            named = re.findall(r"format=(\w+)", (why or "").partition("Nearest: ")[2])
            assert why is None or named
            assert all(refusal(facts, one) is None and unserved(facts, one) is None for one in named)


def test_an_export_is_exported_again_in_another_format(target: Target, target_folder: Path, tmp_path: Path) -> None:
    draft = _trained(target, "dspark-vanilla")
    _export(_saved(tmp_path / "draft", draft), target_folder, tmp_path / "a", "format=speculators")
    _export(tmp_path / "a", target_folder, tmp_path / "b", "format=specforge")
    _export(tmp_path / "b", target_folder, tmp_path / "c", "format=vllm")
    again = load_draft(tmp_path / "c", target)
    mine, theirs = draft.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("change", ["taps", "rotary", "layout"])
def test_verification_notices_what_makes_an_export_decode_otherwise(
    change: str, target: Target, target_folder: Path, tmp_path: Path
) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dflash-fill_in"))
    made, _ = _export(draft, target_folder, tmp_path / "out", "format=vllm", "vocabulary=own")
    config = compose_export(["format=vllm", f"draft={draft}", "device=cpu", *target_overrides(target_folder)])
    if change == "taps":
        made["dflash_config"]["target_layer_ids"] = [0, 2, 3]
    elif change == "rotary":
        made |= {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    else:
        made |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1, 3], "mask_token_id": MASK_TOKEN}
    (tmp_path / "out" / "config.json").write_text(json.dumps(made))
    with pytest.raises(CheckpointError, match=r"decodes otherwise than|answers differ"):
        check_rounds(config, read_config(draft), read_state(draft), draft, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", -3),
        ("vocab_size", None),
        ("num_attention_heads", 0),
        ("num_target_layers", "5"),
        ("mask_token_id", "m"),
        ("rope_parameters", 3),
        ("deepspec_algorithm", []),
        ("rms_norm_eps", None),
        ("layer_types", ["zz", "yy"]),
        ("model_type", "zzz"),
    ],
)
def test_a_config_of_nonsense_is_refused_by_its_key_wherever_it_is_read(
    key: str, value: object, target: Target, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = _saved(tmp_path / "draft", kind_of_draft(target, "dspark-vanilla"))
    (draft / "config.json").write_text(json.dumps(json.loads((draft / "config.json").read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=key if key != "model_type" else value):
        load_draft(draft, target)
    with pytest.raises(CheckpointError, match=key if key != "model_type" else value):
        _export(draft, target_folder, tmp_path / "out", "format=vllm")
    try:
        main(["inspect", str(draft)])
    except SystemExit:
        assert key in capsys.readouterr().err
    else:
        assert "wrong (config)" in capsys.readouterr().out


def test_damage_is_named_by_the_lint(target: Target, tmp_path: Path) -> None:
    draft = _saved(tmp_path / "draft", _trained(target, "dspark-rnn"))
    fields, state = read_config(draft), read_state(draft)
    assert lint(fields, state) == []

    def named(changed_fields: dict[str, Any], changed_state: dict[str, Any]) -> set[str]:
        changed = {name: value for name, value in (state | changed_state).items() if value is not None}
        return {one.name for one in lint(fields | changed_fields, changed)}

    assert named({}, {"norm.weight": None}) == {"missing"}
    assert named({}, {"layers.0.self_attn.sinks": torch.zeros(4)}) == {"unknown"}
    assert named({}, {"fc.weight": torch.ones(32, 64)}) == {"shape"}
    assert named({}, {"markov_head.joint_proj.bias": torch.full((18,), float("nan"))}) == {"not_finite"}
    assert named({}, {"fc.weight": torch.zeros(32, 96)}) == {"zero"}
    assert named({"target_layer_ids": [0, 3, 1]}, {}) == {"taps"}
    assert named({"target_layer_ids": [0, 1, 4]}, {}) == {"taps"}
    assert named({"mask_token_id": 5000}, {}) == {"mask"}
    assert named({"quantization_config": {}}, {}) == {"target_keys"}
    assert named({"block_size": 9}, {}) == {"config"}
