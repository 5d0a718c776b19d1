"""The command line: what it prints, and its exit codes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import weightwire


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "weightwire"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def first_error_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.splitlines()[0]


def test_version():
    assert run("--version").stdout.strip() == weightwire.__version__


@pytest.mark.parametrize("arguments", [("--version",), ("backends", "--json"), ("backends",)])
def test_a_full_disk_is_one_line(arguments):
    program = str(Path(sys.executable).parent / "weightwire")
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert result.returncode == 1
    assert result.stderr == (
        "OSError: No space left on device: make room for what this command writes\n"
    )


@pytest.mark.parametrize("arguments", [("--version",), ("backends", "--json"), ("backends",)])
def test_a_reader_that_has_gone_is_no_traceback(arguments):
    program = str(Path(sys.executable).parent / "weightwire")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        result = subprocess.run(
            [program, *arguments], stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("demo", "--steps", "0")])
def test_a_wrong_command_line_exits_2(arguments):
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize("command", ["backends", "doctor", "inspect", "plan", "demo", "bench"])
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert "--json" in result.stdout


def test_backends_as_json():
    listed = {row["name"]: row for row in json.loads(run("backends", "--json").stdout)["backends"]}
    assert listed["memory"]["available"]
    assert listed["memory"]["capabilities"]["flow"] == "pull"
    assert listed["filesystem"]["capabilities"]["serves_finished"] is True
    assert listed["filesystem"]["distribution"] == f"weightwire {weightwire.__version__}"


def test_backends_says_why_one_cannot_run(tmp_path):
    """A real third-party distribution, whose library is missing, beside a broken one."""
    site = tmp_path / "site"
    for name, body in {
        "acme": textwrap.dedent(
            """
            import weightwire
            from weightwire.contract import Backend, BackendConfig, Capabilities
            from weightwire.errors import BackendUnavailable

            class Acme(Backend):
                name, summary, config = "acme", "pigeons", BackendConfig
                capabilities = Capabilities("pull", "applied", True, False, True, False, True)
                def probe(self):
                    raise BackendUnavailable("pigeons are out: pip install pigeon")
                open_sender = open_receiver = None

            Acme.__abstractmethods__ = frozenset()

            @weightwire.hookimpl
            def weightwire_describe_backend():
                return Acme()
            """
        ),
        "broken": "import a_module_that_is_not_there",
    }.items():
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[weightwire]\n{name} = {name}_plugin\n")
        (site / f"{name}_plugin.py").write_text(body)
    program = "from weightwire.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "backends", "--json"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {row["name"]: row for row in json.loads(result.stdout)["backends"]}
    assert not listed["acme"]["available"]
    assert listed["acme"]["reason"] == "pigeons are out: pip install pigeon"
    assert "a_module_that_is_not_there" in listed["broken"]["reason"]
    assert listed["memory"]["available"]


def test_inspect_shows_versions_and_members(tmp_path):
    import torch

    session = f"file://{tmp_path / 'run'}"
    weights = {"w": torch.arange(6.0)}
    mine = {"w": torch.zeros(6)}
    with (
        weightwire.open_sender("filesystem", session=session, source=weights) as sender,
        weightwire.open_receiver(
            "filesystem", session=session, target=mine, receiver_id="replica-0"
        ) as receiver,
    ):
        sender.send(1)
        receiver.receive(timeout=30)
        with pytest.raises(weightwire.ConfigError):
            sender.send(1)
        seen = json.loads(run("inspect", session, "--json").stdout)
        human = run("inspect", session)
    assert seen["sender"]["alive"]
    assert [(v["version"], v["state"], v["applied"]) for v in seen["versions"]] == [
        (1, "finished", {"replica-0": "yes"})
    ]
    (member,) = seen["receivers"]
    assert (member["member_id"], member["state"], member["serving"]) == ("replica-0", "serving", 1)
    assert human.returncode == 0
    assert "replica-0" in human.stdout
    after = json.loads(run("inspect", session, "--json").stdout)
    assert not after["sender"]["alive"]
    assert after["receivers"][0]["serving"] is None


def test_inspect_watch_prints_a_line_per_look(tmp_path):
    session = f"file://{tmp_path / 'run'}"
    import torch

    with weightwire.open_sender("filesystem", session=session, source={"w": torch.zeros(2)}):
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "weightwire"),
                *("inspect", session, "--watch", "--json", "--interval", "0.1"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            lines = [process.stdout.readline() for _ in range(3)]
        finally:
            process.kill()
            process.communicate()
    assert all(json.loads(line)["sender"]["alive"] for line in lines)


@pytest.mark.parametrize(
    ("url", "error", "fragment"),
    [
        ("file:///nowhere/at/all", "SessionError", "doesn't exist"),
        ("gopher://host/x", "ConfigError", "gopher"),
        ("run42", "ConfigError", "is no URL"),
        ("", "ConfigError", "is no URL"),
    ],
)
def test_inspect_names_what_is_wrong_with_a_url(url, error, fragment):
    result = run("inspect", url)
    assert result.returncode == 1
    assert first_error_line(result).startswith(f"{error}: ")
    assert fragment in first_error_line(result)


def test_inspecting_makes_no_session(tmp_path):
    assert run("inspect", f"file://{tmp_path / 'none'}").returncode == 1
    assert not (tmp_path / "none").exists()


def test_bench_of_an_unknown_backend_lists_the_installed():
    result = run("bench", "pigeon")
    assert result.returncode == 1
    assert "BackendNotFound" in first_error_line(result)
    assert "filesystem" in first_error_line(result)


COMMANDS = """
from weightwire import ConfigError, hookimpl

def greet(name: str, loud: bool = False) -> None:
    "Say hello."
    if name == "nobody":
        raise ConfigError("greet nobody: name somebody")
    print(name.upper() if loud else name)

@hookimpl
def weightwire_describe_commands():
    return {commands}
"""


@pytest.fixture
def with_plugins(tmp_path):
    """Runs the command with distributions of others on the path: their commands by name."""

    def run_with(plugins: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        for name, commands in plugins.items():
            (tmp_path / f"plugin_{name}.py").write_text(COMMANDS.format(commands=commands))
            metadata = tmp_path / f"plugin_{name}-1.0.dist-info"
            metadata.mkdir(exist_ok=True)
            (metadata / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n"
            )
            entry_points = f"[weightwire]\n{name} = plugin_{name}\n"
            (metadata / "entry_points.txt").write_text(entry_points)
        code = (
            "import sys; from weightwire.cli.main import main; sys.argv[0] = 'weightwire'; main()"
        )
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip

    return run_with


def test_plugins_add_commands(with_plugins):
    plugins = {"one": "{'greet': greet, 'backends': greet}"}
    assert with_plugins(plugins, "greet", "ada", "--loud").stdout == "ADA\n"
    failed = with_plugins(plugins, "greet", "nobody")
    assert failed.returncode == 1
    assert first_error_line(failed) == "ConfigError: greet nobody: name somebody"
    assert "Say hello." in with_plugins(plugins, "--help").stdout
    # What is built in can't be replaced.
    assert "memory" in with_plugins(plugins, "backends", "--json").stdout


def test_a_command_that_two_plugins_claim_is_refused_and_hurts_no_other(with_plugins):
    plugins = {"one": "{'greet': greet, 'alone': greet}", "two": "{'greet': greet}"}
    refused = with_plugins(plugins, "greet")
    assert refused.returncode == 1
    for claimant in ("plugin-one 1.0", "plugin-two 1.0"):
        assert claimant in first_error_line(refused)
    assert "alone" in with_plugins(plugins, "--help").stdout
    assert with_plugins(plugins, "alone", "ada").stdout == "ada\n"


def test_a_command_whose_needs_are_missing_says_so_whatever_it_is_given() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from weightwire.cli.main import main\n"
        "sys.argv[1:] = ['watch', '--session', 'file:///x', '--engine', 'http://a', 'more']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "weightwire watch needs httpx: pip install 'weightwire[vllm]'" in done.stderr
