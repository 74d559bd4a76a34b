"""MODEL -> folder: a checkpoint folder, the bundled tiny-e, or a hub id."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from lastrow.models.config import ConfigError

BUNDLED = ("tiny-e", "tiny-e-assistant")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CONFIG_FILES = ("config.json",)
CHECKPOINT_FILES = ("*.json", "*.jinja", "*.safetensors")


class ModelNotFound(ConfigError):
    """MODEL names nothing that can be read; the message says what was tried and what would be right."""


def resolve_model(model: str, revision: str | None = None, config_only: bool = False) -> Path:
    """Folder of a checkpoint.

    model: `tiny-e`, a folder that holds config.json, or a hub id (owner/name), which is downloaded with a progress bar unless
    the local cache has it. revision: branch, tag or commit of a hub model, and of nothing else. config_only: config.json is enough.
    Raises ModelNotFound, or ConfigError for a revision of what has none."""
    if model in BUNDLED:
        _refuse_revision(revision, f"{model} comes with lastrow")
        return Path(str(resources.files("lastrow") / "assets" / model))
    path = Path(model).expanduser()
    if model and path.is_dir():
        _refuse_revision(revision, f"{path} is a folder")
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path}: holds no config.json; a checkpoint folder has config.json, model.safetensors and tokenizer.json")
        return path
    if model and path.exists():
        raise ModelNotFound(f"{path}: is a file; give the folder that holds config.json and model.safetensors")
    if HUB_ID.fullmatch(model) is None or ".." in model:
        raise ModelNotFound(f"no model {model!r}: give a folder, a hub id (owner/name) or {', '.join(BUNDLED)}")
    return _download(model, revision, CONFIG_FILES if config_only else CHECKPOINT_FILES)


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision is {revision!r}: only a hub model has revisions, and {what}; leave it out")


def _download(repo: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except errors.GatedRepoError:
        raise ModelNotFound(f"{repo}: its owner asks for consent; accept it on the model's page, then run `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(f"{repo}: no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(f"{repo}: no folder of that name and no such model on the hub (a private one needs `hf auth login`)") from None
    except errors.LocalEntryNotFoundError:
        raise ModelNotFound(f"{repo}: no folder of that name, not in the local cache, and the hub cannot be reached") from None
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelNotFound(f"{repo}: cannot be downloaded ({reason})") from None
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repo}: the hub's copy holds no config.json")
    return folder
