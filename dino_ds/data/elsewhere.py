"""Answers to names of images from elsewhere: of the Hugging Face Hub, or a bucket. Nothing is fetched."""

from __future__ import annotations

import re

from dino_ds.basics.hubs import hub_id

_COPY = {
    "s3": "aws s3 sync {} DIR",
    "gs": "gcloud storage rsync -r {} DIR",
    "http": "wget {}, and unpack what comes",
    "https": "wget {}, and unpack what comes",
}
"""The command that copies to a disk, by the scheme of an address."""

_HUB_SETS = re.compile(
    r"(hf://(datasets/)?|https?://(www\.)?huggingface\.co/datasets/)"
    r"(?P<name>[\w.-]+(/(?!(tree|blob|resolve|viewer)\b)[\w.-]+)?)"
)
"""An address of a data set; old ones have no owner, and files of it may follow."""


def images_elsewhere(text: str) -> str | None:
    """Advice for the name of a data set on the Hub or in a bucket; None for any other text."""
    found = hub_id(text)
    if found is None and (address := _HUB_SETS.match(text)):
        found = address["name"]
    if found is not None:
        return (
            f"does not exist; if {found} is a data set of the Hugging Face Hub, fetch it first "
            f"(hf download {found} --repo-type dataset --local-dir DIR) and give DIR (folders, .tar and .parquet)"
        )
    scheme = re.match(r"([a-z][a-z0-9+.-]*)://|pipe:", text)
    if scheme is None:
        return None
    copy = _COPY.get(scheme[1] or "")
    return f"is not a local path: mount or copy it{f' ({copy.format(text)})' if copy else ''}, then give"
