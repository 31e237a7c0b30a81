"""`dino-ds export --push OWNER/NAME`: an exported folder on the Hugging Face Hub; a new repository is private."""

from __future__ import annotations

import re
from pathlib import Path

from dino_ds.errors import ConfigError, one_line
from dino_ds.options.model import ExportOptions

_FOLDERS = ("hf", "timm")
"""Formats that the hub's own programs load."""


def check_push(options: ExportOptions) -> None:
    """Whether there is a name and a token, before anything is loaded. Raises ConfigError."""
    import huggingface_hub

    if options.push is None:
        return
    if options.format not in _FOLDERS:
        raise ConfigError(f"--push {options.push}: the Hub's programs read --format {' or '.join(_FOLDERS)}: give one")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", options.push):
        raise ConfigError(f"--push {options.push} is not a repository's name: OWNER/NAME, as yourself/vits16-birds")
    if not huggingface_hub.get_token():
        raise ConfigError(f"--push {options.push}: the Hub knows nobody here: hf auth login, or set HF_TOKEN")


def push(folder: Path, name: str) -> str:
    """Upload the files of `folder`; the address. Raises ConfigError, `folder` stays: the hub's reason, in a line."""
    from huggingface_hub import HfApi

    from dino_ds.weights.find import hub_or_cache

    with hub_or_cache() as why:
        try:
            if why:
                raise ConnectionError(why)
            api = HfApi()
            address = api.create_repo(name, private=True, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Exported by dino_ds")
        except Exception as error:  # of the hub's client, or of httpx, requests, the disk
            raise ConfigError(
                f"--push {name}: {one_line(error)}; the export stays: hf upload {name} {folder} tries again"
            ) from None
    return str(address)
