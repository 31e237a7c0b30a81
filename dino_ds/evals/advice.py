"""Words about evaluations for the user: which recipe key is meant, test images that are trained on."""

from __future__ import annotations

import os
import re

from dino_ds.errors import ConfigError, DataError

OF_ONE_SET = ("retrieval", "statistics")


def with_recipe_keys(name: str, error: ConfigError | DataError) -> ConfigError | DataError:
    """The message of an evaluation with recipe keys in the place of the flags of `dino-ds eval`."""
    words = {
        "(--images)": "(eval.bank_images, eval.test_images)",
        "--images": "--eval.bank_images",
        "with --test_root DIR": "with --eval.root DIR (--eval.val_share 0.1 holds some out of training), or leave "
        "this out with --eval.evals auto",
        "--test_root": "--eval.root",
        "--benchmark_root": "--eval.benchmark_root",
        "--k": "--eval.k",
    }
    text = re.sub("|".join(map(re.escape, words)), lambda flag: words[flag[0]], str(error))
    return type(error)(f"eval.evals {name}: {text}")


def note_on_shared(train_root: str | None, test_root: str | None, option: str) -> list[str]:
    """A note where the test images are the training images; `option` names others."""
    if train_root is None or test_root is None or os.path.realpath(train_root) != os.path.realpath(test_root):
        return []
    where = f"the test images are the training images, {test_root}"
    return [f"{where}: a score on them says nothing about new images; name others with {option}"]
