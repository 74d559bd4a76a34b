"""MODEL -> folder, and one clear line for what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastrow.engine.llm import LLM
from lastrow.models.config import ConfigError
from lastrow.weights.resolve import CHECKPOINT_FILES, ModelNotFound, resolve_model


def test_bundled_and_folder(tiny_e: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("tiny-e") == tiny_e
    assert resolve_model(str(tiny_e)) == tiny_e
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(tmp_path.name) == Path(tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nope", "no model 'nope': give a folder, a hub id"),
        ("./nope", "no model"),
        ("/nope/at/all", "no model"),
        ("a/b/c", "no model"),
        ("../b", "no model"),
        ("In the beginning", "no model"),
        ("", "no model"),
    ],
)
def test_names_that_are_none(model: str, says: str) -> None:
    with pytest.raises(ModelNotFound, match=says):
        resolve_model(model)


def test_a_revision_of_what_is_on_this_machine_is_refused(tiny_e: Path) -> None:
    """It was ignored without a word. Through Python as through resolve_model: before anything is loaded."""
    for model, says in (("tiny-e", "tiny-e comes with lastrow"), (str(tiny_e), f"{tiny_e} is a folder")):
        for ask in (lambda model: resolve_model(model, "v1"), lambda model: LLM(model, revision="v1")):
            with pytest.raises(ConfigError, match=f"revision is 'v1': only a hub model has revisions, and {says}; leave it out") as caught:
                ask(model)
            assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFound, match="no model 'nope'"):
        resolve_model("nope", "v1")


def test_folder_without_config_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(tmp_path / "x.gguf"))


def test_hub_errors_become_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The errors huggingface_hub itself raises, made without the network."""
    import httpx2
    import huggingface_hub
    from huggingface_hub import errors

    response = httpx2.Response(404, request=httpx2.Request("GET", "https://hub.invalid"))
    asked: dict[str, Any] = {}
    cases = [
        (errors.GatedRepoError("x", response=response), "consent"),
        (errors.RevisionNotFoundError("x", response=response), "no revision 'r9'"),
        (errors.RepositoryNotFoundError("x", response=response), "no such model on the hub"),
        (errors.LocalEntryNotFoundError("x"), "hub cannot be reached"),
        (errors.HFValidationError("bad id\nsecond line"), r"cannot be downloaded \(bad id\)"),
        (OSError(28, "No space left on device"), "No space left"),
    ]
    for error, says in cases:

        def fail(repo: str, _error: Exception = error, **options: Any) -> str:
            asked.update(options, repo=repo)
            raise _error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelNotFound, match=says) as caught:
            resolve_model("owner/name", revision="r9")
        assert "\n" not in str(caught.value)
    assert asked == {"repo": "owner/name", "revision": "r9", "allow_patterns": list(CHECKPOINT_FILES)}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        resolve_model("owner/name")
