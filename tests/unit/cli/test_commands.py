"""The commands end to end over a daemon's sockets: output, JSON, errors, exit statuses."""

import json
import os
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.documents.answers import Applied
from kata_pin.base.documents.state import State
from kata_pin.base.errors import DaemonError, KataPinError
from kata_pin.base.json_text import Fields
from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, plain

STATE = docs.state(docs.database(), docs.drifted(), docs.lost())
CALM = docs.state(docs.database())


def _state(document: State = STATE) -> Any:
    return {"state": lambda _: deepcopy(document)}


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the one JSON document on stdout."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_show_prints_one_line_a_sandbox(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """Into a pipe each sandbox is one line without colours, whatever COLUMNS says."""
    config = serve(_state())
    assert run(["show", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("default/db-0" in line for line in lines) == 1
    assert not any("\x1b" in line for line in lines)
    assert any("0→6-7 1→4 2→5" in line for line in lines)


@pytest.mark.parametrize("options", [["--config", "{}", "--json", "show"], ["show", "--json"]])
def test_options_stand_before_or_after_the_command(
    serve: Serve, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """--json and --config are taken in both places."""
    config = str(serve(_state()))
    arguments = [option.replace("{}", config) for option in options]
    if config not in arguments:
        arguments += ["--config", config]
    assert run(arguments) == 0
    assert _json(capsys) == plain(STATE)


@pytest.mark.parametrize(
    "name", ["default/db-0", "db-0", docs.database().id, docs.database().id[:8]]
)
def test_a_sandbox_is_named_in_four_ways(
    serve: Serve, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """namespace/name, name, id and the start of an id all choose it."""
    config = serve(_state())
    assert run(["show", name, "--json", "--config", str(config)]) == 0
    assert [one["pod"] for one in _json(capsys)["sandboxes"]] == ["default/db-0"]


def test_an_unknown_sandbox_is_an_error_with_a_hint(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that fits nothing gives one line, the nearest name, and status 1."""
    config = serve(_state())
    assert run(["show", "db-1", "--config", str(config)]) == 1
    assert capsys.readouterr().err == ("kata-pin: no sandbox 'db-1'\n  hint: did you mean db-0?\n")


def test_an_ambiguous_name_lists_the_candidates(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sandboxes whose ids begin so, or two pods of one name, are named in the error."""
    one = docs.sandbox("a/web", "4", id="abc1" * 16)
    two = docs.sandbox("b/web", "5", id="abc2" * 16)
    config = serve(_state(docs.state(one, two)))
    for name in ("abc", "web"):
        assert run(["show", name, "--config", str(config)]) == 1
        error = capsys.readouterr().err
        assert f"'{name}' matches 2 sandboxes: a/web (abc1abc1abc1), b/web (abc2abc2abc2)" in error


def test_hostile_names_do_not_reach_the_terminal(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither output nor error texts carry control characters of a pod or an argument."""
    config = serve(_state(docs.hostile()))
    for arguments in (["show"], ["show", "--cpus"], ["show", "ns/\x1b[31m"], ["show", "--json"]):
        run([*arguments, "--config", str(config)])
        captured = capsys.readouterr()
        assert all(c.isprintable() or c == "\n" for c in captured.out + captured.err)


def test_explain_asks_for_the_whole_id(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon is asked by id, whatever the user typed."""
    asked: list[str] = []

    def explain(request: Fields) -> object:
        asked.append(request.text("sandbox"))
        return docs.explained()

    config = serve({**_state(), "explain": explain})
    assert run(["explain", "db-0", "--config", str(config)]) == 0
    assert asked == [docs.database().id]
    assert "remedies: raise default_vcpus" in capsys.readouterr().out


@pytest.mark.parametrize(("document", "status"), [(CALM, 0), (STATE, 3)])
def test_check_exits_3_on_drift(
    serve: Serve, capsys: pytest.CaptureFixture[str], document: State, status: int
) -> None:
    """Drift is status 3, everything in place is 0, in text and as JSON."""
    config = str(serve(_state(document)))
    assert run(["check", "--config", config]) == status
    page = capsys.readouterr().out
    assert page.startswith("FAIL: 2 drifting threads, " if status else "ok: ")
    assert run(["check", "--json", "--config", config]) == status
    told = _json(capsys)
    assert told["ok"] is (status == 0)
    kinds = {"drift", "other-writer"} if status else set()
    assert {f["kind"] for f in told["findings"] if f["fails"]} == kinds


def test_check_says_when_the_daemon_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """No state document is status 4 too."""

    def refuse(_: Fields) -> object:
        raise DaemonError("the state is not for you", hint="ask root")

    config = str(serve({"state": refuse}))
    assert run(["check", "--config", config]) == 4
    out = capsys.readouterr().out
    assert "unknown: the state is not for you (ask root)" in out
    assert "COULD NOT TELL: 0 sandboxes, 0 threads checked" in out
    assert run(["check", "--json", "--config", config]) == 4
    assert _json(capsys)["verdict"] == "unknown"


def test_check_without_a_daemon_is_never_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody keeps affinities then, even if each thread is where it should be."""
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}\npaths: {{vc: {tmp_path}/vc}}\n")
    assert run(["check", "--config", str(config)]) == 4
    assert "the daemon is not running, state read from /proc (no daemon is listening on " in (
        " ".join(capsys.readouterr().out.split())
    )


def test_check_fails_on_intruders_by_setting(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """This very process may run on a pCPU that is exclusive: reported, or status 3 by setting."""
    cpu = min(os.sched_getaffinity(0))
    sandbox = docs.sandbox("a/b", str(cpu), exclusive=str(cpu))
    config = serve(_state(docs.state(sandbox, cpus=16)))
    assert run(["check", "--json", "--config", str(config)]) == 0
    found = _json(capsys)["findings"]
    (mine,) = (
        one
        for one in found
        if one["group"] and os.getpid() in [process["pid"] for process in one["group"]["processes"]]
    )
    assert (mine["kind"], mine["fails"], mine["cpus"]) == ("intruder", False, str(cpu))
    assert 0 <= mine["group"]["last_there"] <= mine["group"]["threads"]
    config.write_text(config.read_text() + "intruders: fail\n")
    assert run(["check", "--config", str(config)]) == 3


def test_pin_exits_1_when_the_kernel_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused thread is told and makes the status 1."""
    config = serve({**_state(), "pin": lambda _: docs.done()})
    assert run(["pin", "--config", str(config)]) == 1
    assert "! tid 5103: affinity 14-15 refused" in capsys.readouterr().out


def test_unpin_exits_1_when_an_option_restored_nothing(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if every affinity was restored."""
    done = Applied(kind="unpin", sandboxes=(), options_failed=("option siren: why",))
    config = serve({**_state(), "unpin": lambda _: done})
    assert run(["unpin", "--config", str(config)]) == 1
    assert "! not restored: option siren: why" in capsys.readouterr().out


def test_unpin_without_a_name_means_all(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """No sandbox is named to the daemon then; with a name its id is."""
    asked: list[str] = []

    def unpin(request: Fields) -> object:
        asked.append(request.text("sandbox"))
        return {"version": 2, "kind": "unpin", "sandboxes": []}

    config = serve({**_state(), "unpin": unpin})
    assert run(["unpin", "--config", str(config)]) == 0
    assert run(["unpin", "db-0", "--config", str(config)]) == 0
    assert asked == ["", docs.database().id]
    assert "no sandboxes" in capsys.readouterr().out


def test_a_refusal_of_the_daemon_is_one_line(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the daemon refuses is printed with its hint, as JSON too where asked."""

    def refuse(_: Fields) -> object:
        raise DaemonError("not pinned: the daemon only observes", hint="setting mode: act")

    config = str(serve({**_state(), "pin": refuse}))
    assert run(["pin", "--config", config, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "kata-pin: not pinned: the daemon only observes\n  hint: setting mode: act\n"
    )
    assert json.loads(captured.out) == {
        "version": 2,
        "kind": "error",
        "error": "not pinned: the daemon only observes",
        "hint": "setting mode: act",
        "exit_status": 1,
    }


def test_another_version_of_the_document_is_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an upgrade the old daemon's document is not guessed at."""
    config = serve({"state": lambda _: replace(STATE, version=3)})
    assert run(["show", "--config", str(config)]) == 1
    assert "document has version 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("version: 1\nmodus: act\n", 78, "modus: no such setting"),
        ("version: 1\nmode: \x1b[31m\n", 78, "not YAML"),
        ("version: 1\nmode: 'a\\x1b'\n", 78, "expected one of act, observe"),
    ],
)
def test_a_wrong_configuration_is_status_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int, words: str
) -> None:
    """Every command ends with 78 and names the file."""
    file = tmp_path / "k.yaml"
    file.write_text(text)
    for arguments in (["show"], ["check"], ["config", "show"], ["config", "check"]):
        assert run([*arguments, "--config", str(file)]) == status
        error = capsys.readouterr().err
        assert f"kata-pin: {file}: " in error
        assert words in error


def test_config_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """show prints what holds, --changed what differs, sample is a legal file, check says ok."""
    file = tmp_path / "k.yaml"
    file.write_text("version: 1\naudit: {affinity_s: 2}\n")
    options = ["--config", str(file)]
    assert run(["config", "show", "--changed", *options]) == 0
    assert capsys.readouterr().out == ("version: 1\naudit:\n  affinity_s: 2  # default: 10\n")
    assert run(["config", "show", "--json", *options]) == 0
    audit = _json(capsys)["settings"]["audit"]
    assert (audit["affinity_s"], audit["deep_s"]) == (2, 60)
    assert run(["config", "sample"]) == 0
    file.write_text(capsys.readouterr().out)
    assert run(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"


@pytest.mark.parametrize(
    "arguments", [["shwo"], ["show", "--cpu"], ["who", "x"], ["who", "-1"], []]
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors are click's, on stderr."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage: kata-pin" in captured.out + captured.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("bind db --vcpu 0 --cpus 4 --for 0s", "--for: expected 1s to 30d"),
        ("bind db --vcpu 0 --cpus 4 --for 31d", "--for: expected 1s to 30d"),
        ("bind db --vcpu 0 --cpus 4 --overhead=", "--overhead: names no pCPU"),
        ("bind --clear --overhead=", "--clear takes no other option"),
        ("show --config=", "'--config': names no file"),
        ("config check ''", "FILE: names no file"),
    ],
)
def test_what_is_given_but_empty_or_out_of_bounds_is_named(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable of a shell that is not set does not mean the default."""
    assert run(shlex.split(arguments)) == 2
    assert error in capsys.readouterr().err


def test_a_command_that_needs_the_daemon_says_how_to_look_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sandbox can be bound without it, for example."""
    file = tmp_path / "k.yaml"
    file.write_text(f"version: 1\nruntime_dir: {tmp_path}/absent\n")
    for arguments in (["reload"], ["bind", "--clear"], ["config", "show", "--running"]):
        assert run([*arguments, "--config", str(file)]) == 1
        error = capsys.readouterr().err
        assert "no daemon is listening on" in error
        assert error.endswith("hint: systemctl status kata-pin\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sohw"], "No such command 'sohw'. Did you mean show?"),
        (["alloc", "wat-if"], "No such command 'wat-if'. Did you mean what-if?"),
        (["config", "zzz"], "No such command 'zzz'. Commands: "),
        (["show", "--cpu"], "No such option '--cpu'. Did you mean '--cpus'?"),
        (["who", "x"], "not a CPU number or range"),
        (["show", "web", "--problems"], "give neither SANDBOX nor --cpus"),
        (["show", "--cpus", "-n", "shop"], "-n cannot limit it"),
        (["show", "--watch=nan"], "'nan' is not a number"),
        (["top", "--interval", "nan"], "'nan' is not a number"),
        (["prove", "--max-foreign", "nan"], "'nan' is not a number"),
        (["prove", "--max-foreign", "101"], "not in the range"),
        (["prove", "--for", "0s"], "expected 1s to 1d"),
    ],
)
def test_wrong_usage_is_explained_as_json_too(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo names what was meant; with --json the same is a document on stdout."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert run([*arguments, "--json"]) == 2
    document = _json(capsys)
    assert (document["kind"], document["exit_status"]) == ("error", 2)
    assert words in document["error"]
    assert document["hint"].endswith(" --help")


THREE = docs.state(
    docs.sandbox("shop/web", "4", docs.thread(5000, "emulator", "4"), exclusive="4"),
    docs.sandbox("bank/web", "4-5", state="conflict"),
    replace(docs.drifted(), pod="bank/feed"),
)


def _shown(out: str) -> list[str]:
    return [pod for pod in ("shop/web", "bank/web", "bank/feed") if f"\n{pod} " in out]


@pytest.mark.parametrize(
    ("arguments", "pods", "remark"),
    [
        ([], ["shop/web", "bank/web", "bank/feed"], ""),
        (["-n", "bank"], ["bank/web", "bank/feed"], ""),
        (["--problems"], ["bank/web", "bank/feed"], "2 of 3 sandboxes have problems\n"),
        (["--problems", "-n", "shop"], [], "no problems in 1 sandbox in namespace shop\n"),
        (["-n", "shpo"], [], "no sandboxes in namespace shpo\n"),
    ],
)
def test_show_chooses_sandboxes(
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    pods: list[str],
    remark: str,
) -> None:
    """By namespace and by problems; how many were left out is said."""
    config = str(serve(_state(THREE)))
    assert run(["show", *arguments, "--config", config]) == 0
    out = capsys.readouterr().out
    assert _shown(out) == pods
    assert remark in out
    assert run(["show", *arguments, "--json", "--config", config]) == 0
    assert [one["pod"] for one in _json(capsys)["sandboxes"]] == pods


def test_a_namespace_makes_a_name_unique(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pods of one name are told apart by -n, in each command that has it."""
    config = str(serve(_state(THREE)))
    assert run(["show", "web", "--config", config]) == 1
    assert "matches 2 sandboxes" in capsys.readouterr().err
    assert run(["show", "web", "-n", "bank", "--json", "--config", config]) == 0
    assert [one["pod"] for one in _json(capsys)["sandboxes"]] == ["bank/web"]
    assert run(["check", "web", "-n", "shop", "--json", "--config", config]) == 3
    assert _json(capsys)["sandboxes"] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "kinds", "sandboxes"),
    [
        (["shop/web"], 3, {"conflict"}, 1),
        (["bank/web"], 3, {"conflict"}, 1),
        (["feed"], 3, {"drift", "other-writer"}, 1),
        (["-n", "bank"], 3, {"conflict", "drift", "other-writer"}, 2),
        (["-n", "none"], 0, set(), 0),
    ],
)
def test_check_of_some_sandboxes(
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: list[str],
    status: int,
    kinds: set[str],
    sandboxes: int,
) -> None:
    """Only what concerns them is found and counted, a conflict from both of its sides."""
    config = str(serve(_state(THREE)))
    assert run(["check", *arguments, "--json", "--config", config]) == status
    document = _json(capsys)
    assert {one["kind"] for one in document["findings"] if one["fails"]} == kinds
    assert document["sandboxes"] == sandboxes


def test_doctor_of_one_sandbox(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon, what every guest needs, and the rows of that sandbox."""
    config = str(serve(_state(THREE)))
    assert run(["doctor", "feed", "--json", "--config", config]) == 0
    rows = _json(capsys)["rows"]
    assert {row["sandbox"] for row in rows} == {"", "bank/feed"}
    assert {row["check"] for row in rows if not row["sandbox"]} == {"daemon", "guest"}


def test_who_takes_a_list(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """`who 0,2-3` is one answer about three pCPUs."""
    config = str(serve(_state()))
    assert run(["who", "0,2-3", "--json", "--config", config]) == 0
    document = _json(capsys)
    assert (document["cpus"], [one["cpu"] for one in document["pcpus"]]) == ("0,2-3", [0, 2, 3])
    assert run(["who", "0,2-3", "--config", config]) == 0
    assert "NUMA  SIBLINGS" in capsys.readouterr().out


def test_who_without_cpus_is_about_exclusive_ones(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """All exclusive pCPUs of the node, of whatever sandbox; an error where there are none."""
    config = str(serve(_state(THREE)))
    assert run(["who", "--json", "--config", config]) == 0
    exclusive = union(CpuSet.parse(one.exclusive) for one in THREE.sandboxes)
    assert _json(capsys)["cpus"] == str(exclusive)
    assert exclusive
    config = str(serve(_state(docs.state(docs.sandbox("a/b", "4-5")))))
    assert run(["who", "--config", config]) == 1
    error = capsys.readouterr().err
    assert "no sandbox of this node has exclusive pCPUs" in error
    assert "kata-pin who 0-3" in error
    assert run(["who", "", "--config", config]) == 2


def test_exit_statuses_are_those_of_the_error_tree() -> None:
    """Documented statuses and classes agree."""
    assert KataPinError("x").exit_code == 1
    assert DaemonError("x").exit_code == 1


def test_a_page_that_cannot_be_written_fails_before_the_measurement(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after a minute."""
    page = tmp_path / "absent" / "page.html"
    config = str(serve(_state()))
    assert run(["prove", "--for", "1d", "--html", str(page), "--config", config]) == 1
    assert capsys.readouterr().err == f"kata-pin: cannot write {page}: No such file or directory\n"
