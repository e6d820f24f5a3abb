"""``tools/make_checkpoint.py`` and the folder it writes."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.models import registry
from minuet.models.m3.export import PRESETS, make_checkpoint, shape_of
from minuet.models.m3.weights import load_weights
from minuet.models.tokenizer import Tokenizer

TOOL = Path(__file__).parents[2] / "tools" / "make_checkpoint.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_folder_is_complete(checkpoint: Callable[..., Path]) -> None:
    assert {path.name for path in checkpoint("tiny").iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_ids_agree_between_the_files(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("tiny")
    tokenizer = Tokenizer.load(folder)
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    eos = tokenizer.token_id("[e~[")
    assert config["text_config"]["eos_token_id"] == generation["eos_token_id"] == eos
    assert config["text_config"]["bos_token_id"] == tokenizer.token_id("]~!b[")
    assert tokenizer.vocab_size <= config["text_config"]["vocab_size"]


def test_same_seed_same_bytes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    first = checkpoint("tiny")
    again = make_checkpoint(tmp_path / "again", preset="tiny")
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_command_line(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m3"
    sizes = ["--layers", "2", "--kv-heads", "4", "--vocab", "300", "--dtype", "bfloat16"]
    options = ["--seed", "9", "--shard-size", "100KB", "--vision-stub"]
    assert tool.main([str(folder), "--preset", "tiny", *sizes, *options]) == 0
    found = registry.find(str(folder))
    assert (found.spec.num_layers, found.spec.num_kv_heads) == (2, 4)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    load_weights(folder, found.spec, DType.BF16, "cpu")
    assert f"{found.facts.params:,}" in capsys.readouterr().out


def test_help_teaches(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    text = capsys.readouterr().out
    for preset in PRESETS:
        assert f"  {preset} " in text
    assert "--load-format dummy" in text


def test_files_in_the_way_are_kept_unless_forced(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, preset="tiny", shard_bytes=300_000)
    (tmp_path / "notes.txt").write_text("mine")
    assert tool.main([str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert tool.main([str(tmp_path), "--force"]) == 0
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_impossible_sizes_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        make_checkpoint(tmp_path / "m3", heads=7)
    assert not (tmp_path / "m3").exists()


def test_unknown_sizes_and_presets_are_named() -> None:
    with pytest.raises(ConfigError, match="colour"):
        shape_of("tiny", colour=3)
    with pytest.raises(ConfigError, match="tiny128"):
        shape_of("huge")
