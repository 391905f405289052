"""Checkpoints by their names on the hub: `owner/name`, or `owner/name@revision` with a branch, tag or commit.

huggingface_hub keeps them in its own cache (HF_HOME says where). What goes on after a download that was cut are its
files: those complete are kept, those begun are fetched again.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from kimi_jax.checkpoint.errors import CheckpointError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
FILES = ("*.safetensors", "*.json", "tiktoken.model")
"""What a checkpoint or a drafter is made of."""
OUTLINE = ("config.json", "model.safetensors.index.json")
"""What says how large a checkpoint is and how it would lie on a mesh."""


def is_name(checkpoint: Path) -> bool:
    """Whether this names a repository on the hub: nothing of that path is here, and it has the form of a name."""
    return not checkpoint.exists() and NAME.fullmatch(str(checkpoint)) is not None


def local_folder(
    checkpoint: Path,
    tell: Callable[[str], None],
    *,
    outline: bool = False,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of a checkpoint: the path itself where it exists, otherwise the hub's files, downloaded if need be.

    All files are of one commit, which `tell` is told; naming it (`owner/name@commit`) gives the same files for ever.
    Without a network, files that are all in the cache already serve.

    Args:
      checkpoint: a folder, or the name of a repository on the hub.
      tell: takes a line for the user.
      outline: only `OUTLINE`, a few megabytes, and no weights.
      cache, endpoint: instead of huggingface_hub's own, which environment variables set.

    Raises:
      CheckpointError: neither a folder nor a repository; no access; no network and not in the cache; no space.
    """
    if not is_name(checkpoint):
        return checkpoint
    repository, _, revision = str(checkpoint).partition("@")

    # Only here: most runs have a folder, and it takes a while to import.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    root = Path(cache or constants.HF_HUB_CACHE)
    where = {"repo_id": repository, "cache_dir": str(root), "allow_patterns": list(OUTLINE if outline else FILES)}
    missing, downloading = f"{checkpoint}: no such folder here, and ", False
    try:
        try:
            files = snapshot_download(**where, revision=revision or None, endpoint=endpoint, dry_run=True)
        except DryRunError as error:
            if isinstance(error.__cause__, GatedRepoError | RepositoryNotFoundError):
                raise error.__cause__ from None
            folder = Path(snapshot_download(**where, revision=revision or None, local_files_only=True))
            tell(f"{repository}@{folder.name} from the cache; the hub cannot be reached")
            return folder
        names = [file.filename for file in files]
        if outline and (absent := [name for name in OUTLINE if name not in names]):
            raise CheckpointError(f"{missing}the repository of that name on the hub has no {absent[0]}")
        if not outline and not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{missing}the repository of that name on the hub has no safetensors files")
        commit = files[0].commit_hash
        needed = sum(file.file_size or 0 for file in files if file.will_download)
        if needed:
            _check_space(root, repository, needed)
            tell(f"{repository}@{commit}: downloading {needed / 1e9:,.3f} GB to {root}")
        else:
            tell(f"{repository}@{commit} from the cache")
        downloading = True
        return Path(snapshot_download(**where, revision=commit, endpoint=endpoint))
    except GatedRepoError:
        cause = "the hub asks for your agreement first: give it on the repository's page, then `hf auth login`"
    except RepositoryNotFoundError:
        cause = "no repository of that name on the hub (a private one needs `hf auth login`)"
    except RevisionNotFoundError:
        cause = f"the repository of that name on the hub has no revision {revision}"
    except (HfHubHTTPError, OSError) as error:
        cause = f"the download from the hub failed; the same command goes on with the files that are missing ({error})"
        # Also what a file raises that had not begun when the network went away.
        if isinstance(error, LocalEntryNotFoundError) and not downloading:
            cause = (
                "the hub cannot be reached and its files are not all in the cache: give the folder of a checkpoint, or "
                "run once where there is a network"
            )
    raise CheckpointError(missing + cause)


def _check_space(root: Path, repository: str, needed: int) -> None:
    """Refuses a download that would not fit.

    Raises:
      CheckpointError: with the bytes that are missing.
    """
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{repository}: {needed / 1e9:,.1f} GB to download and {free / 1e9:,.1f} GB free at {existing}: make room, "
            "or set HF_HOME to a folder on a larger disk"
        )
