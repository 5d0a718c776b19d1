"""From one config string to a backend and its validated options.

Selection is two-step: the name picks a plug-in, and that plug-in's own pydantic
model reads the rest.  An unknown key is an error, an unknown name lists what is
installed, and a backend that can't run here says what to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import pydantic

from weightwire.contract import Backend, BackendConfig
from weightwire.errors import ConfigError, UnsupportedOperation
from weightwire.plugins import probe, registry

__all__ = ["BackendChoice", "select"]

OPTIONAL = {
    "zero_copy": "it can't serve the trainer's own tensors",
    "snapshot": "it keeps no copies for late receivers (catch_up= stores them)",
}
"""Options that mean the same to every backend that has them, and what others do instead."""

BackendChoice: TypeAlias = str | Mapping[str, Any] | tuple[str, BackendConfig]
"""A backend name, ``{"backend": name, **options}``, or a name with validated options."""


def select(choice: BackendChoice) -> tuple[Backend, BackendConfig]:
    """The backend and its options; the backend has been probed.

    Raises:
        BackendNotFound: no installed plug-in has this name.
        PluginError: the plug-in is broken.
        ConfigError: an option is unknown or wrong.
        UnsupportedOperation: an option that other backends have (``zero_copy``).
        BackendUnavailable: the backend can't run here.
    """
    name, options = _split(choice)
    backend = registry().backend(name)
    config = _validate(backend, options)
    probe(backend)
    return backend, config


def _split(choice: BackendChoice) -> tuple[str, Mapping[str, Any] | BackendConfig]:
    if isinstance(choice, str):
        return choice, {}
    if isinstance(choice, tuple) and len(choice) == 2:
        return choice
    if isinstance(choice, Mapping):
        name = choice.get("backend")
        if not isinstance(name, str):
            raise ConfigError(
                "the backend config has no 'backend' key: write {'backend': 'filesystem', ...}"
            )
        return name, {key: value for key, value in choice.items() if key != "backend"}
    raise ConfigError(
        f"backend {choice!r} is a {type(choice).__name__}: give a name or a mapping with 'backend'"
    )


def _validate(backend: Backend, options: Mapping[str, Any] | BackendConfig) -> BackendConfig:
    if isinstance(options, BackendConfig):
        if not isinstance(options, backend.config):
            raise ConfigError(
                f"backend {backend.name!r} takes {backend.config.__name__}, "
                f"not {type(options).__name__}"
            )
        return options
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"the options of backend {backend.name!r} are a {type(options).__name__}: "
            f"give a mapping or a {backend.config.__name__}"
        )
    try:
        return backend.config.model_validate(dict(options))
    except pydantic.ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False):
            key = ".".join(str(part) for part in problem["loc"]) or "(config)"
            if problem["type"] == "extra_forbidden" and key in OPTIONAL:
                raise UnsupportedOperation(
                    f"backend {backend.name!r} has no option {key!r}: {OPTIONAL[key]}; leave it "
                    "out, or choose another backend"
                ) from None
            if problem["type"] == "extra_forbidden":
                known = ", ".join(backend.config.model_fields) or "none"
                problems.append(
                    f"backend {backend.name!r} has no option {key!r}: its options are {known}"
                )
            else:
                problems.append(f"backend {backend.name!r}, option {key!r}: {problem['msg']}")
        raise ConfigError("\n".join(problems)) from None
