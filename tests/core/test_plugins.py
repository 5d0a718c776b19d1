"""Plug-ins as distributions of others: good, broken in every way, and rivals.

Each is a real distribution with an entry point, installed into a directory that
one process has on its path: all of them together, so that none may hurt another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from weightwire import hookimpl
from weightwire.errors import BackendUnavailable, PluginError
from weightwire.memory import MemoryBackend
from weightwire.plugins import Registry, probe
from weightwire.report import VersionRecord

BACKEND = """
from weightwire import hookimpl
from weightwire.contract import Backend, BackendConfig, Capabilities
import weightwire.session  # a package whose name begins like a hook's must do no harm
import weightwire_shared

class Config(BackendConfig):
    pass

class Good(Backend):
    name = {name!r}
    summary = "for tests"
    config = Config
    capabilities = Capabilities("pull", "applied", True, False, True, True, True)
    def open_sender(self, context): ...
    def open_receiver(self, context): ...

@hookimpl
def weightwire_describe_backend():
    return Good()
"""


def changed(name: str, *changes: tuple[str, str]) -> str:
    source = BACKEND.format(name=name)
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


DISTRIBUTIONS = {
    "good": changed("good"),
    "absent": "import a_library_that_is_not_there",
    "syntax": "def (:",
    "exits": "raise SystemExit(3)",
    "skips": "class Skipped(BaseException): pass\nraise Skipped('not here')",
    "leaves": changed("leaves", ("return Good()", "raise SystemExit(3)")),
    "odd": "def __dir__():\n    return ['weightwire_x']\ndef __getattr__(name):\n    1 / 0",
    "quits": changed(
        "quits",
        (
            "    def open_sender",
            "    def probe(self):\n        raise SystemExit(3)\n    def open_sender",
        ),
    ),
    "misspelt": changed(
        "misspelt",
        ("@hookimpl\ndef weightwire_describe_backend", "@hookimpl\ndef weightwire_describe_backnd"),
    ),
    "unmarked": changed("unmarked", ("@hookimpl\n", "")),
    "argument": changed(
        "argument", ("weightwire_describe_backend():", "weightwire_describe_backend(x):")
    ),
    "returns": changed("returns", ("return Good()", "return 'Good'")),
    "forgets": changed("forgets", ("return Good()", "return Good")),
    "raises": changed("raises", ("return Good()", "raise ValueError('no')")),
    "older": changed("older", ("name = 'older'", "name = 'older'\n    api = 99")),
    "plain": changed("plain", ("class Config(BackendConfig)", "class Config")),
    "incapable": changed(
        "incapable",
        ('Capabilities("pull", "applied", True, False, True, True, True)', "{}"),
    ),
    "nameless": changed("nameless", ("name = 'nameless'", "name = 'Not A Name'")),
    "abstract": changed("abstract", ("    def open_sender(self, context): ...\n", "")),
    "rival-one": changed("rival"),
    "rival-two": changed("rival"),
    "scheme": textwrap.dedent(
        """
        from weightwire import hookimpl

        @hookimpl
        def weightwire_describe_session_scheme():
            return 5
        """
    ),
    "hangs": changed(
        "hangs",
        (
            "    def open_sender",
            (
                "    def probe(self):\n        import threading\n        threading.Event().wait()\n"
                "    def open_sender"
            ),
        ),
    ),
    "needy": changed(
        "needy",
        (
            "    def open_sender",
            "    def probe(self):\n        import a_library_that_is_not_there\n    def open_sender",
        ),
    ),
}

ASK = """
import json
from weightwire import plugins
from weightwire.config import select
from weightwire.errors import WeightWireError

answers = {}
for name in NAMES:
    try:
        if name == "hangs":
            plugins.probe(plugins.registry().backend(name), 0.3)
        else:
            select(name)
        answers[name] = ["ok", ""]
    except WeightWireError as error:
        answers[name] = [type(error).__name__, str(error)]
try:
    plugins.registry().session_scheme("scheme")
except WeightWireError as error:
    answers["session scheme"] = [type(error).__name__, str(error)]
answers["listed"] = sorted({item.name for item in plugins.registry().backends()})
print(json.dumps(answers))
"""


def install(directory: Path, name: str, source: str) -> None:
    """A wheel's contents: a module, and metadata with an entry point."""
    module = f"acme_{name.replace('-', '_')}"
    (directory / f"{module}.py").write_text(source)
    metadata = directory / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[weightwire]\n{name} = {module}\n")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[str, str]]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "weightwire_shared.py").write_text("")
    for name, source in DISTRIBUTIONS.items():
        install(directory, name, source)
    names = [*DISTRIBUTIONS, "rival", "memory", "filesystem", "nothing"]
    code = f"import sys\nsys.path.insert(0, {str(directory)!r})\nNAMES = {names!r}\n{ASK}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["good", "memory", "filesystem"])
def test_broken_plug_ins_of_others_leave_the_good_ones_alone(answers, name):
    assert answers[name] == ["ok", ""]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "absent",
            "plug-in 'absent' of acme-absent 1.0 doesn't import (ModuleNotFoundError: No mo",
        ),
        ("syntax", "plug-in 'syntax' of acme-syntax 1.0 doesn't import (SyntaxError: "),
        ("exits", "plug-in 'exits' of acme-exits 1.0 doesn't import (SystemExit: 3): reinstall or"),
        (
            "skips",
            "plug-in 'skips' of acme-skips 1.0 doesn't import (Skipped: not here): reinstall",
        ),
        (
            "leaves",
            (
                "plug-in 'leaves' of acme-leaves 1.0 failed in weightwire_describe_backend "
                "(SystemExit: 3): upgrade or remove it"
            ),
        ),
        ("odd", "plug-in 'odd' of acme-odd 1.0 can't be looked at (ZeroDivisionError: division by"),
        (
            "misspelt",
            (
                "plug-in 'misspelt' of acme-misspelt 1.0 implements unknown hook "
                "'weightwire_describe_backnd': the hooks are weightwire_aborted, "
                "weightwire_applied, weightwire_describe_backend, "
            ),
        ),
        (
            "unmarked",
            (
                "plug-in 'unmarked' of acme-unmarked 1.0 has 'weightwire_describe_backend' without "
                "its mark: decorate it with weightwire.hookimpl"
            ),
        ),
        ("argument", "plug-in 'argument' of acme-argument 1.0 doesn't fit the hooks ("),
        (
            "returns",
            (
                "weightwire_describe_backend of acme-returns 1.0 returned a str: "
                "return a weightwire.contract.Backend"
            ),
        ),
        ("forgets", "weightwire_describe_backend of acme-forgets 1.0 returned a ABCMeta: return a"),
        (
            "raises",
            (
                "plug-in 'raises' of acme-raises 1.0 failed in weightwire_describe_backend "
                "(ValueError: no): upgrade or remove it"
            ),
        ),
        (
            "older",
            (
                "backend 'older' of acme-older 1.0 was written for contract 99, this weightwire "
                "has 1: install versions that match"
            ),
        ),
        ("plain", "backend 'plain' of acme-plain 1.0 has config <class 'acme_plain.Config'>: subc"),
        ("incapable", "backend 'incapable' of acme-incapable 1.0 declares no Capabilities"),
        ("nameless", "backend name 'Not A Name' of acme-nameless 1.0 isn't [a-z][a-z0-9_.-]*"),
        ("abstract", "plug-in 'abstract' of acme-abstract 1.0 failed in weightwire_describe_back"),
        (
            "scheme",
            (
                "weightwire_describe_session_scheme of acme-scheme 1.0 returned a int: "
                "return a weightwire.session.SessionScheme"
            ),
        ),
    ],
)
def test_a_broken_plug_in_says_what_is_wrong_when_its_name_is_asked_for(answers, name, message):
    kind, said = answers[name]
    assert kind == "PluginError"
    assert said.startswith(message)


def test_a_name_that_two_distributions_claim_is_an_error_naming_both(answers):
    kind, said = answers["rival"]
    assert kind == "PluginError"
    assert said in {
        (
            "backend 'rival' is claimed by acme-rival-one 1.0 and by acme-rival-two 1.0: "
            "uninstall one of them"
        ),
        (
            "backend 'rival' is claimed by acme-rival-two 1.0 and by acme-rival-one 1.0: "
            "uninstall one of them"
        ),
    }


def test_a_known_backend_whose_library_is_missing_is_unavailable_not_unknown(answers):
    kind, said = answers["needy"]
    assert kind == "BackendUnavailable"
    assert said.startswith(
        "backend 'needy' of acme-needy 1.0 can't run here (ModuleNotFoundError: No module named"
    )


def test_a_probe_that_would_end_the_process_only_ends_itself(answers):
    kind, message = answers["quits"]
    assert kind == "BackendUnavailable"
    assert message.startswith("backend 'quits' of acme-quits 1.0 can't run here (SystemExit: 3)")


def test_a_probe_that_hangs_is_given_up(answers):
    assert answers["hangs"] == [
        "BackendUnavailable",
        (
            "backend 'hangs' of acme-hangs 1.0 didn't finish its probe within 0.3 s: its library "
            "hangs on this machine; choose another backend, or upgrade it"
        ),
    ]


def test_an_unknown_name_lists_what_is_installed_and_what_did_not_load(answers):
    kind, said = answers["nothing"]
    assert kind == "BackendNotFound"
    first, *rest = said.splitlines()
    assert first.startswith("no backend 'nothing' is installed; installed: filesystem, good, ")
    assert any(line.startswith("not loaded: plug-in 'absent'") for line in rest)


def test_a_broken_scheme_is_an_error_of_its_own(answers):
    assert answers["session scheme"][0] == "PluginError"


def test_broken_plug_ins_are_listed_with_the_good_ones(answers):
    assert {"good", "absent", "misspelt", "memory"} <= set(answers["listed"])


# ---------------------------------------------------------------------- observers


class Observer:
    def __init__(self) -> None:
        self.seen: list[VersionRecord] = []

    @hookimpl
    def weightwire_published(self, record: VersionRecord) -> None:
        self.seen.append(record)


class Failing:
    @hookimpl
    def weightwire_published(self, record: VersionRecord) -> None:
        raise RuntimeError("exporter is down")


RECORD = VersionRecord("file:///x", "sender", "sender", 3)


def test_observers_get_the_record_and_one_that_fails_is_logged_and_goes_no_further(caplog):
    plugins, observer = Registry(), Observer()
    plugins.register(Failing(), "failing")
    plugins.register(observer, "observer")
    plugins.notify("weightwire_published", RECORD)
    assert observer.seen == [RECORD]
    assert "observer failing (this process) failed" in caplog.text
    plugins.unregister("observer")
    plugins.notify("weightwire_published", RECORD)
    assert len(observer.seen) == 1


def test_an_observer_without_its_mark_is_an_error_and_not_ignored():
    class Unmarked:
        def weightwire_applied(self, record: VersionRecord) -> None: ...

    plugins = Registry()
    plugins.register(Unmarked(), "unmarked")
    with pytest.raises(PluginError, match="has 'weightwire_applied' without its mark"):
        plugins.backend("unmarked")


def test_what_was_registered_can_be_taken_back():
    class Describes:
        @hookimpl
        def weightwire_describe_backend(self) -> MemoryBackend:
            return MemoryBackend()

    plugins = Registry()
    plugins.register(Describes(), "mine")
    assert plugins.backend_names() == ["memory"]
    plugins.unregister("mine")
    assert plugins.backend_names() == []


# ---------------------------------------------------------------------- probing


def test_what_a_probe_says_itself_is_raised_as_it_is():
    class Unavailable(MemoryBackend):
        def probe(self) -> None:
            raise BackendUnavailable("nixl isn't installed: pip install 'weightwire[nixl]'")

    with pytest.raises(BackendUnavailable, match=r"pip install 'weightwire\[nixl\]'"):
        probe(Unavailable())


def test_a_probe_interrupted_by_the_user_is_an_interrupt():
    class Interrupted(MemoryBackend):
        def probe(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(Interrupted())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (["greet"], "returned a list"),
        ({"greet": "hello"}, "isn't a function by a name"),
        ({"Greet All": print}, "isn't a function by a name"),
    ],
)
def test_commands_that_are_none_are_refused(returned, message):
    class Plugin:
        @hookimpl
        def weightwire_describe_commands(self):
            return returned

    found = Registry()
    found.register(Plugin(), "plugin")
    assert found.command_names() == []
    with pytest.raises(PluginError, match=message):
        found.backend("plugin")
