"""The command line loads only what it runs, and reports errors in one line."""

import importlib.util
import sys
import types

import pytest

import gcmoe
from gcmoe import cli
from gcmoe.errors import UnsupportedDevice


@pytest.fixture
def fake_module(monkeypatch):
    """Puts a stand-in for the simulator's report in place and returns it."""
    module = types.ModuleType("gcmoe.sim.report")
    module.add_arguments = lambda parser: parser.add_argument("--ranks", type=int, default=2)
    module.main = lambda namespace: namespace.ranks
    monkeypatch.setattr(cli.Command, "load", lambda command: module)
    return module


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda c: c.name)
def test_every_command_has_a_module(command):
    assert importlib.util.find_spec(command.module) is not None


def test_help_lists_all_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [c.name for c in cli.COMMANDS if c.name not in text] == []


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"gcmoe {gcmoe.__version__}"


@pytest.mark.parametrize("words", [[], ["nothing"], ["sim", "--ranks", "two"]])
def test_bad_usage_exits_with_2(fake_module, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "usage: gcmoe" in capsys.readouterr().err


def test_status_is_that_of_the_command(fake_module):
    assert cli.main(["sim", "--ranks", "5"]) == 5
    fake_module.main = lambda namespace: None
    assert cli.main(["sim"]) == 0


def test_a_reported_error_is_one_line(fake_module, capsys):
    def fail(namespace):
        raise UnsupportedDevice("compute capability 9.0 wanted, found 8.0")

    fake_module.main = fail
    assert cli.main(["sim"]) == 1
    assert capsys.readouterr().err == (
        "gcmoe: UnsupportedDevice: compute capability 9.0 wanted, found 8.0\n"
    )


def test_a_missing_dependency_names_the_remedy(fake_module, capsys, monkeypatch):
    def fail(namespace):
        import cutlass  # noqa: F401

    monkeypatch.setitem(sys.modules, "cutlass", None)
    fake_module.main = fail
    assert cli.main(["sim"]) == 2
    assert "pip install 'gc-moe[compile]'" in capsys.readouterr().err


def test_another_missing_module_is_a_defect(fake_module):
    def fail(namespace):
        raise ModuleNotFoundError("no", name="gcmoe.absent")

    fake_module.main = fail
    with pytest.raises(ModuleNotFoundError):
        cli.main(["sim"])


def test_public_names():
    assert gcmoe.__all__ == sorted(gcmoe.__all__)
    assert set(gcmoe.__all__) <= set(dir(gcmoe))
    assert issubclass(gcmoe.PeerTimeout, gcmoe.GCMoEError)
    assert gcmoe.MoEConfig.__module__ == "gcmoe.config"
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        gcmoe.Nothing  # noqa: B018


def test_every_error_is_public():
    from gcmoe import errors

    classes = {n for n, v in vars(errors).items() if isinstance(v, type)}
    assert classes <= set(gcmoe.__all__)


@pytest.mark.parametrize("name", gcmoe.__all__)
def test_public_names_load(name):
    assert getattr(gcmoe, name) is not None
