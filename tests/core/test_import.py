"""What importing weightwire does, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weightwire
from weightwire import errors

TRANSPORTS = ["vllm", "nixl", "nixl_cu12", "redis", "modelexpress", "safetensors", "transformers"]


def output(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_importing_weightwire_imports_no_transport_and_no_plug_in():
    loaded = output(
        "import sys, weightwire\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(tops))\n"
        "print(*sorted(n for n in sys.modules if n.startswith('weightwire.memory')))"
    ).splitlines()
    tops = set(loaded[0].split())
    assert "weightwire" in tops
    assert not tops.intersection(TRANSPORTS)
    assert not [name for name in tops if name.startswith("weightwire_")]
    assert loaded[1:] in ([], [""])


def test_torch_is_imported_only_for_what_needs_it():
    said = output(
        "import sys, weightwire\n"
        "print('torch' in sys.modules, sorted(set(weightwire.__all__) - set(dir(weightwire))))\n"
        "weightwire.metrics, weightwire.open_sender\n"
        "print('torch' in sys.modules, hasattr(weightwire, 'nonsense'))"
    )
    assert said.splitlines() == ["False []", "True False"]


@pytest.mark.parametrize(
    "line", ["--help", "watch --help", "inspect file:///nonesuch", "doctor -x"]
)
def test_commands_that_move_nothing_start_without_torch(line):
    said = output(
        "import sys\n"
        f"sys.argv = ['weightwire', *{line.split()}]\n"
        "from weightwire.cli.main import main\n"
        "sys.stdout = sys.stderr = open('/dev/null', 'w')\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.stderr = sys.__stderr__\n"
        "print('torch' in sys.modules, file=sys.__stdout__)"
    )
    assert said == "False"


def test_importing_starts_no_thread_installs_no_signal_handler_and_configures_no_logging():
    said = output(
        "import logging, signal, threading\n"
        "before = [signal.getsignal(s) for s in signal.valid_signals()]\n"
        "import weightwire\n"
        "print(threading.active_count(), logging.getLogger().handlers,\n"
        "      before == [signal.getsignal(s) for s in signal.valid_signals()])"
    )
    assert said == "1 [] True"


def test_the_logger_is_silent_until_the_application_configures_it():
    said = output(
        "import logging, weightwire\n"
        "logger = logging.getLogger('weightwire')\n"
        "print([type(handler).__name__ for handler in logger.handlers])\n"
        "logging.getLogger('weightwire.session').warning('not to be seen')"
    )
    assert said == "['NullHandler']"


@pytest.mark.parametrize("name", weightwire.__all__)
def test_everything_public_exists_and_is_documented(name):
    value = getattr(weightwire, name)
    assert isinstance(value, str) or value.__doc__
    assert not name.startswith("_") or name == "__version__"


def test_every_error_is_public_documented_and_in_the_drawing():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert getattr(weightwire, name) is kind
        assert issubclass(kind, weightwire.WeightWireError)
        assert kind.__doc__
        assert name in errors.__doc__


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("BackendNotFound", "ConfigError"),
        ("AuthenticationError", "SessionError"),
        ("TransferTimeout", "TransferError"),
        ("PeerLost", "TransferError"),
        ("VerificationError", "TransferError"),
    ],
)
def test_the_tree_is_as_drawn(kind, base):
    assert issubclass(getattr(errors, kind), getattr(errors, base))


def test_errors_are_also_what_python_calls_them():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.TransferTimeout, TimeoutError)
    assert issubclass(errors.HandleError, RuntimeError)
