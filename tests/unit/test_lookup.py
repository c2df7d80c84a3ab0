from __future__ import annotations

import pytest

from deepspec.errors import ConfigError
from deepspec.lookup import available, load_module, nearest


def test_every_file_of_a_folder_is_a_name_except_what_the_names_share():
    assert available("algorithms") == ("dflash", "dspark", "eagle3")
    assert {"llama", "qwen3", "gemma4"} <= set(available("targets"))


def test_nearest_suggests_the_word_that_was_probably_meant():
    assert nearest("dsprk", ["dflash", "dspark", "eagle3"]) == " Did you mean 'dspark'?"
    assert nearest("DSpark", ["dflash", "dspark"]) == " Did you mean 'dspark'?"


def test_nearest_stays_silent_when_nothing_resembles_the_word():
    assert nearest("zzz", ["dflash", "dspark"]) == ""
    assert nearest("zzz", []) == ""


def test_unknown_module_is_refused_with_what_exists_and_the_nearest_name():
    message = "algorithm 'dsprk' does not exist. Available: dflash, dspark, eagle3. Did you mean 'dspark'?"
    with pytest.raises(ConfigError) as caught:
        load_module("algorithms", "dsprk", "algorithm")
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["base", "dspark.os", "../errors", "", "__init__"])
def test_names_from_a_checkpoint_cannot_import_anything_else(name: str):
    with pytest.raises(ConfigError, match="does not exist"):
        load_module("algorithms", name, "algorithm")


def test_module_is_imported_by_its_name():
    assert load_module("targets", "qwen3", "family").__name__ == "deepspec.targets.qwen3"
