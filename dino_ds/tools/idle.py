"""Options that would change nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dino_ds.errors import ConfigError


def check_unused_options(
    flag: str, asked: Collection[str], concerns: Mapping[str, Collection[str]], given: Mapping[str, object]
) -> None:
    """Raises ConfigError for a `given` option (None: it is not) that concerns nothing of what is `asked` by --`flag`.

    concerns: option -> what it changes something of.
    """
    for option, value in given.items():
        if value is not None and not set(concerns[option]) & set(asked):
            raise ConfigError(
                f"--{option} changes nothing of {', '.join(asked)}: it is for {', '.join(concerns[option])}; "
                f"add one to --{flag}, or leave --{option} out"
            )
