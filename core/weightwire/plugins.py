"""Plug-ins: found by entry point, loaded one by one, checked before they are believed.

A plug-in that fails to import, misspells a hook or returns the wrong thing hurts
nobody but itself: the failure is kept, and raised when its name is asked for.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

import pluggy

from weightwire import hookspecs
from weightwire.contract import API, Backend, BackendConfig, Capabilities
from weightwire.doctor.check import Check, validate_checks
from weightwire.errors import (
    BackendNotFound,
    BackendUnavailable,
    ConfigError,
    PluginError,
    WeightWireError,
)
from weightwire.observers import Observer
from weightwire.report import VersionRecord
from weightwire.session.store import SessionScheme

__all__ = ["ENTRY_POINT_GROUP", "Provided", "Registry", "registry"]

log = logging.getLogger("weightwire.plugins")

ENTRY_POINT_GROUP = "weightwire"
PROBE_SECONDS = 20.0
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}\Z")

T = TypeVar("T")


@dataclass(frozen=True)
class Provided:
    """One thing that a plug-in provides, or why it doesn't.

    Attributes:
        name: backend name or URL scheme; the entry point's name when that isn't known.
        distribution: ``name version`` of the distribution, for messages.
        value: the backend or scheme; None when ``error`` says what is wrong.
        plugin: name of the plug-in that provides it.
    """

    name: str
    distribution: str
    value: Any
    error: PluginError | None = None
    plugin: str = ""


class Registry:
    """All that is installed, plus what ``register`` adds in this process."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._backends: list[Provided] = []
        self._schemes: list[Provided] = []
        self._commands: list[Provided] = []
        self._checks: list[Provided] = []
        self._broken: list[Provided] = []
        self._observers: list[Observer] = []
        self._complained: set[tuple[str, str]] = set()

    def load_entry_points(
        self, skip: Container[str] = (), told: Callable[[str], object] = lambda _: None
    ) -> None:
        """Load every entry point of the group; failures are kept by name.

        Args:
            skip: names that aren't loaded.
            told: called with each name before it is loaded, for whoever may not come back.
        """
        for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
            if entry_point.name in skip:
                continue
            told(entry_point.name)
            distribution = _describe(entry_point.dist)
            try:
                plugin = entry_point.load()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: it is the plug-in that ends, not us
                remedy = "reinstall or remove it"
                self._blame(entry_point.name, distribution, "doesn't import", error, remedy)
                continue
            self.register(plugin, entry_point.name, distribution)

    def register(self, plugin: object, name: str, distribution: str = "this process") -> None:
        """Add one plug-in; whatever is wrong with it is raised when its name is used."""
        label = f"{name} ({distribution})"
        try:
            _check_hooks(plugin, f"plug-in {name!r} of {distribution}")
            self._manager.register(plugin, label)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.has_plugin(label):
                self._manager.unregister(name=label)
            self._fail(
                name,
                distribution,
                f"plug-in {name!r} of {distribution} doesn't fit the hooks ({error}): upgrade it",
                error,
            )
            return
        except PluginError as error:
            self._fail(name, distribution, str(error), None)
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._blame(name, distribution, "can't be looked at", error)
            return
        self._collect(plugin, name, distribution)

    def _collect(self, plugin: object, name: str, distribution: str) -> None:
        for hook, found, check in (
            ("weightwire_describe_backend", self._backends, _backend_by_name),
            ("weightwire_describe_session_scheme", self._schemes, _scheme_by_name),
            ("weightwire_describe_commands", self._commands, _check_commands),
            ("weightwire_describe_checks", self._checks, validate_checks),
        ):
            implementation = getattr(plugin, hook, None)
            if implementation is None:
                continue
            try:
                provided: Mapping[str, Any] = check(implementation(), distribution)
            except PluginError as error:
                self._fail(name, distribution, str(error), error)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._blame(name, distribution, f"failed in {hook}", error)
            else:
                found.extend(
                    Provided(key, distribution, value, plugin=name)
                    for key, value in provided.items()
                )

    def _blame(
        self,
        name: str,
        distribution: str,
        what: str,
        error: BaseException,
        remedy: str = "upgrade or remove it",
    ) -> None:
        """Keep what a plug-in raised as its failure."""
        why = f"{type(error).__name__}: {error}"
        message = f"plug-in {name!r} of {distribution} {what} ({why}): {remedy}"
        self._fail(name, distribution, message, error)

    def _fail(
        self, name: str, distribution: str, message: str, cause: BaseException | None
    ) -> None:
        error = PluginError(message)
        error.__cause__ = cause
        log.debug("%s", message)
        self._broken.append(Provided(name, distribution, None, error, plugin=name))

    # -------------------------------------------------------------------- selection

    def backend(self, name: str) -> Backend:
        """The backend of this name, importable but not yet probed.

        Raises:
            BackendNotFound: nothing installed has this name.
            PluginError: its plug-in is broken, or two distributions claim the name.
        """
        value: Backend = self._select(self._backends, name, "backend", BackendNotFound)
        return value

    def session_scheme(self, scheme: str) -> SessionScheme:
        """The session-store scheme of this name."""
        value: SessionScheme = self._select(self._schemes, scheme, "session scheme", ConfigError)
        return value

    def command(self, name: str) -> Callable[..., object]:
        """The function behind a plug-in's subcommand.

        Raises:
            ConfigError: no plug-in has one of this name.
            PluginError: its plug-in is broken, or two distributions claim the name.
        """
        value: Callable[..., object] = self._select(self._commands, name, "command", ConfigError)
        return value

    def command_names(self) -> list[str]:
        """Subcommands that plug-ins provide."""
        return sorted({item.name for item in self._commands})

    def check(self, name: str) -> Check:
        """What ``weightwire doctor`` tries by this name.

        Raises:
            ConfigError: no plug-in has one of this name.
            PluginError: its plug-in is broken, or two distributions claim the name.
        """
        value: Check = self._select(self._checks, name, "check", ConfigError)
        return value

    def check_names(self) -> list[str]:
        """Checks that plug-ins bring, in their own order."""
        return list(dict.fromkeys(item.name for item in self._checks))

    def backends(self) -> list[Provided]:
        """Everything that is or wants to be a backend, by name; broken plug-ins included."""
        return sorted(
            [*self._backends, *self._broken], key=lambda item: (item.name, item.distribution)
        )

    def distribution_of(self, backend: Backend) -> str:
        """Where a backend comes from, for messages."""
        for item in self._backends:
            if item.value is backend:
                return item.distribution
        return "this process"

    def backend_names(self) -> list[str]:
        return sorted({item.name for item in self._backends})

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Tell it of every version; the function that is returned ends that."""
        if not isinstance(observer, Observer):
            raise ConfigError(
                f"{type(observer).__name__} is no weightwire.Observer: derive it from that"
            )
        self._observers = [*self._observers, observer]  # never changed in place: no lock

        def stop() -> None:
            self._observers = [other for other in self._observers if other is not observer]

        return stop

    def is_observed(self, hook: str) -> bool:
        """Whether anybody wants to know: a record is made only then."""
        return bool(self._observers) or bool(getattr(self._manager.hook, hook).get_hookimpls())

    def notify(self, hook: str, record: VersionRecord) -> None:
        """Call an observer hook; what observers raise is logged once and goes no further."""
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            try:
                implementation.function(**{"record": record} if implementation.argnames else {})
            except Exception:
                self._complain(implementation.plugin_name, hook)
        for observer in self._observers:
            try:
                getattr(observer, hook.removeprefix("weightwire_"))(record)
            except Exception:
                self._complain(f"{type(observer).__name__} at {id(observer):#x}", hook)

    def _complain(self, who: str, hook: str) -> None:
        """Log what is being handled: with all of it the first time, and never again."""
        if (who, hook) not in self._complained:
            self._complained.add((who, hook))
            log.exception("observer %s failed in %s; it is told of later versions", who, hook)

    def unregister(self, name: str, distribution: str = "this process") -> None:
        """Take back what ``register`` added."""
        label = f"{name} ({distribution})"
        if self._manager.has_plugin(label):
            self._manager.unregister(name=label)
        for found in (self._backends, self._schemes, self._commands, self._checks, self._broken):
            found[:] = [
                item for item in found if (item.plugin, item.distribution) != (name, distribution)
            ]

    def _select(
        self, found: list[Provided], name: str, what: str, missing: type[ConfigError]
    ) -> Any:
        matches = [item for item in found if item.name == name]
        if len(matches) > 1:
            claimants = " and by ".join(match.distribution for match in matches)
            raise PluginError(f"{what} {name!r} is claimed by {claimants}: uninstall one of them")
        if matches:
            return matches[0].value
        for item in self._broken:
            if item.name == name and item.error is not None:
                raise item.error
        installed = ", ".join(sorted({item.name for item in found})) or "none"
        broken = "".join(f"\nnot loaded: {item.error}" for item in self._broken)
        raise missing(f"no {what} {name!r} is installed; installed: {installed}{broken}")


@functools.cache
def registry() -> Registry:
    """The process's registry, filled from entry points on first use."""
    loaded = Registry()
    loaded.load_entry_points()
    return loaded


def probe(backend: Backend, seconds: float = PROBE_SECONDS) -> None:
    """Run a backend's probe, but not for longer than ``seconds``.

    Native code that doesn't let go of the interpreter's lock holds this process with all its
    threads: nothing in it can end that.  The conformance kit's own processes are ended.

    Raises:
        BackendUnavailable: it can't run here, or its probe failed or hangs.
    """
    who = f"backend {backend.name!r} of {registry().distribution_of(backend)}"
    _within(
        backend.probe,
        seconds,
        BackendUnavailable(
            f"{who} didn't finish its probe within {seconds:g} s: its library hangs on this "
            "machine; choose another backend, or upgrade it"
        ),
        lambda error: BackendUnavailable(
            f"{who} can't run here ({type(error).__name__}: {error}): upgrade or remove it"
        ),
    )


def _within(
    work: Callable[[], None],
    seconds: float,
    timeout: WeightWireError,
    translate: Callable[[BaseException], WeightWireError],
) -> None:
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="weightwire-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise timeout
    if failure:
        error = failure[0]
        if isinstance(error, WeightWireError | KeyboardInterrupt):
            raise error
        raise translate(error) from error


def _check_hooks(plugin: object, label: str) -> None:
    """Every function that looks like a hook is one, and marked as one."""
    known = _hook_names()
    for name in dir(plugin):
        hook = getattr(plugin, name, None)
        # A module that the plug-in imports may be called weightwire_something too.
        if not name.startswith("weightwire_") or not inspect.isroutine(hook):
            continue
        if name not in known:
            raise PluginError(
                f"{label} implements unknown hook {name!r}: the hooks are {', '.join(known)}"
            )
        if not hasattr(hook, f"{hookspecs.PROJECT}_impl"):
            raise PluginError(
                f"{label} has {name!r} without its mark: decorate it with weightwire.hookimpl"
            )


def _backend_by_name(value: object, distribution: str) -> dict[str, object]:
    return {_check_backend(value, distribution): value}


def _scheme_by_name(value: object, distribution: str) -> dict[str, object]:
    return {_check_scheme(value, distribution): value}


def _check_backend(value: object, distribution: str) -> str:
    if not isinstance(value, Backend):
        raise PluginError(
            f"weightwire_describe_backend of {distribution} returned a {type(value).__name__}: "
            "return a weightwire.contract.Backend"
        )
    name = getattr(value, "name", None)
    if not isinstance(name, str) or not _NAME.match(name):
        raise PluginError(f"backend name {name!r} of {distribution} isn't [a-z][a-z0-9_.-]*")
    if value.api != API:
        raise PluginError(
            f"backend {name!r} of {distribution} was written for contract {value.api!r}, "
            f"this weightwire has {API}: install versions that match"
        )
    config = getattr(value, "config", None)
    if not (isinstance(config, type) and issubclass(config, BackendConfig)):
        raise PluginError(
            f"backend {name!r} of {distribution} has config {config!r}: "
            "subclass weightwire.contract.BackendConfig, a pydantic model"
        )
    if not isinstance(getattr(value, "capabilities", None), Capabilities):
        raise PluginError(
            f"backend {name!r} of {distribution} declares no Capabilities: "
            "set its `capabilities` to a weightwire.contract.Capabilities"
        )
    return name


def _check_scheme(value: object, distribution: str) -> str:
    if not isinstance(value, SessionScheme):
        raise PluginError(
            f"weightwire_describe_session_scheme of {distribution} returned a "
            f"{type(value).__name__}: return a weightwire.session.SessionScheme"
        )
    scheme = getattr(value, "scheme", None)
    if not isinstance(scheme, str) or not _NAME.match(scheme):
        raise PluginError(f"session scheme {scheme!r} of {distribution} isn't [a-z][a-z0-9_.-]*")
    return scheme


def _check_commands(value: object, distribution: str) -> dict[str, Callable[..., object]]:
    if not isinstance(value, Mapping):
        raise PluginError(
            f"weightwire_describe_commands of {distribution} returned a {type(value).__name__}: "
            "return a mapping of names to functions"
        )
    for name, function in value.items():
        if not isinstance(name, str) or not _NAME.match(name) or not inspect.isroutine(function):
            raise PluginError(
                f"command {name!r} of {distribution} isn't a function by a name of "
                "[a-z][a-z0-9_.-]*"
            )
    return dict(value)


def _describe(distribution: metadata.Distribution | None) -> str:
    if distribution is None:
        return "an unknown distribution"
    return f"{distribution.metadata['Name']} {distribution.version}"


def _hook_names() -> list[str]:
    return sorted(name for name in dir(hookspecs) if name.startswith("weightwire_"))
