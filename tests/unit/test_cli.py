import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from sluice import cli
from sluice.api.common.v1 import wait_service_pb2, wait_service_pb2_grpc
from sluice.config import load_config
from sluice.durable import DirectoryError, owned
from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def sluice(monkeypatch, capsys):
    """Runs the command; its exit code and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        try:
            code = cli.main()
        except SystemExit as end:  # argparse's, after --help
            code = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    "command", ["up", "train", "eval", "sft", "convert", "verify", "waits", "status"]
)
def test_every_command_lists_its_keys(sluice, command):
    code, out, err = sluice(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: sluice {command}")
    assert "--security.token_file" in out


@pytest.mark.parametrize("command", ["doctor", "init", "report", "samples"])
def test_a_command_that_calls_nobody_lists_its_keys_too(sluice, command):
    code, out, err = sluice(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: sluice {command}")
    assert out.count("--") > 3
    assert "--security" not in out


def test_help_is_no_error_and_names_every_command(sluice):
    code, out, _ = sluice("--help")
    assert code == 0
    assert all(f"sluice {name} " in out for name in cli.USAGE)
    assert sluice("trace", "--help")[:2] == (
        0,
        f"usage: {cli.USAGE['trace']}\n\n{cli.SUMMARY['trace']}\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean train?"),
        (["train"], "usage: sluice train RUN.yaml"),
        (["train", "absent.yaml"], "absent.yaml does not exist"),
        (["train", "--steps", "3"], "the file comes before flags"),
        (["train", "run.yaml", "--stpes", "3"], "unknown flag --stpes; did you mean --steps?"),
        (["train", "run.yaml", "more.yaml"], "unknown argument more.yaml"),
        (["train", "run.yaml"], "is `sluice up` running?"),
        (["train", "typo.yaml"], "groups_per_stp: unknown key; did you mean groups_per_step?"),
        (["train", "run.yaml", "--services", "broken.json"], "is not a services.json"),
        (["train", "run.yaml", "--services", "empty.json"], "no trainer"),
        (["up", "."], "Is a directory"),
        (["up", "binary.yaml"], "not valid YAML"),
        (["up", "/dev/zero"], "config file /dev/zero: holds more than"),
        (["up", "up.yaml"], "services.a.kind"),
        (["up", "router.yaml", "--on", "mars"], "neither local nor ray"),
        (["up", "router.yaml", "--on"], "--on needs a value"),
        (["up", "router.yaml", "--address", "h:1"], "give --on ray"),
        (["down", "."], "has no services that run"),
        (["down", "nowhere"], "is no directory"),
        (["down", "x" * 5000], "is no directory"),
        (["convert", "x" * 5000, "made"], "is no directory"),
        (["convert", ".", "made", "--to", "hf", "--origin", "x" * 5000], "can be no path"),
        (["down", "gone"], "does not say which Ray"),
        (["down", ".", "."], "down takes one RUN_DIR"),
        (["trace", "--all"], "unknown flag --all"),
        (["trace", "gone", "--stepz", "3"], "did you mean --steps?"),
        (["trace", "gone", "--steps=5-1"], "ends before it begins"),
        (["train", "run.yaml", "--upp", "x"], "did you mean --up?"),
        (["up", "router.yaml", "--onn", "ray"], "did you mean --on?"),
        (["status", "gone", "--jsn"], "did you mean --json?"),
        (["status", "gone", "--json", "--json"], "--json is given twice"),
        (["waits", "gone", "--security.token_fil", "x"], "did you mean --security.token_file?"),
        (["report", "gone", "--tokeniser", "x"], "did you mean --tokenizer?"),
        (["samples", "gone", "--contain", "x"], "did you mean --contains?"),
        (["convert", ".", "made", "--too", "hf"], "did you mean --to?"),
        (["verify", ".", "made", "--modle", "x"], "did you mean --model?"),
        (["doctor", "--prot", "1"], "did you mean --port?"),
        (["init", ".", "x", "--engin", "sglang"], "did you mean --engine?"),
        (["import-slime", "x.sh", "--o", "x"], "did you mean -o?"),
        (["check-loss", "grpo", "--setings", "{}"], "did you mean --settings?"),
        (["demo", "--stpes", "3"], "did you mean --steps?"),
        (["demo", "--run_dir", "x"], "did you mean --run-dir?"),
        (["protoset", "."], "Is a directory"),
        (["protoset", "a\0b"], "null byte"),
        (["protoset", "x", "y"], "protoset takes one FILE"),
        (["trace", "nowhere"], "is no run directory"),
        (["trace", "x" * 5000], "is no run directory"),
        (["trace", "x" * 300], "is no run directory"),
        (["report", "x" * 300], "is no run directory"),
        (["samples", "x" * 300], "is no run directory"),
        (["trace", "gone"], "holds no traces"),
        (["trace", "gone", "--steps", "5-1"], "ends before it begins"),
        (["trace", "gone", "--steps", "x" * 5000], "neither FIRST-LAST nor all"),
        (["waits", "nowhere"], "neither a run directory nor host:port"),
        (["waits", "x" * 5000], "neither a run directory nor host:port"),
        (
            ["waits", "absent.json#trainer"],
            "absent.json does not exist; is `sluice up` running? It keeps",
        ),
        (["status", "absent.json#trainer"], "absent.json does not exist"),
        (["waits", "127.0.0.1:99999"], "a port is 1 to 65535"),
        (["waits", "127.0.0.1:0"], "a port is 1 to 65535"),
        (["status", "127.0.0.1:65536"], "a port is 1 to 65535"),
        (["convert", ".", "made", "--address", "node"], "address: 'node' is not host:port"),
        (["verify", ".", "made", "--address", "node:"], "address: 'node:' is not host:port"),
        (["samples", "gone", "--min_reward", "nan"], "min_reward"),
        (["samples", "gone", "--min_reward", "1", "--max_reward", "0.5"], "more than max_reward"),
        (["samples", "gone", "--finish_reason", "stopped"], "finish_reason"),
        (["status", "--once"], "RUN_DIR or ADDRESS comes first"),
        (["status", "nowhere"], "neither a run directory nor host:port"),
        (["status", "."], "holds no run"),
        (["init", "model"], "init takes MODEL_DIR and TASK"),
        (["completion", "csh"], "is no shell"),
        (["import-slime", "absent.sh"], "No such file"),
        (["report", "nowhere"], "is no run directory"),
        (["samples", "--limit", "3"], "samples takes one RUN_DIR"),
        (["waits", "--all"], "ADDRESS comes first"),
    ],
)
def test_a_mistake_is_answered_in_one_line(sluice, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    run = (
        "run_dir: x\nservices: services.json\nprompts: {index_count: 1}\n"
        "environment: {name: prompts}\nsampling: {max_new_tokens: 1}\n"
    )
    (tmp_path / "run.yaml").write_text(run)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "ray.json").write_text("{")
    (tmp_path / "router.yaml").write_text("run_dir: x\nservices: {a: {kind: router}}\n")
    (tmp_path / "typo.yaml").write_text(run + "groups_per_stp: 1\n")
    (tmp_path / "up.yaml").write_text("run_dir: x\nservices: {a: {kind: roter}}\n")
    (tmp_path / "binary.yaml").write_bytes(b"\x89PNG")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    code, out, err = sluice(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "127.0.0.1:1", "--timeout_seconds", "600"], "nobody listens there"),
        (["waits", "127.0.0.1:1"], "waits: 127.0.0.1:1: nobody listens there"),
        (["profile", "127.0.0.1:1"], "profile: 127.0.0.1:1: nobody listens there"),
    ],
)
def test_a_service_that_is_not_there_is_told_in_one_line(tmp_path, arguments, message):
    """In a process of its own, as a user has it: event loops of one process share gRPC's poller,
    which logs a BlockingIOError where another loop was faster (grpc/grpc#25364)."""
    ended = subprocess.run(
        [sys.executable, "-m", "sluice.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_directory_has_one_owner_who_is_named(tmp_path):
    hold = (
        "import sys, sluice.durable as d, pathlib\n"
        "with d.owned(pathlib.Path(sys.argv[1]), 'up'): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryError, match=f"process {holder.pid} .*up"):
            owned(tmp_path / "run", "up").__enter__()
        with owned(tmp_path / "run", "train"):  # another role
            pass
        holder.kill()
        holder.wait(timeout=PATIENCE)
        with owned(tmp_path / "run", "up"):  # the kernel ended the claim
            pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"run_dir: .*file"):
        owned(tmp_path / "file" / "run", "up").__enter__()


@pytest.mark.parametrize("command", ["report", "samples"])
def test_a_token_of_the_environment_is_no_matter_of_who_calls_nobody(
    sluice, tmp_path, monkeypatch, command
):
    monkeypatch.setenv("SLUICE_SECURITY__TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("SLUICE_STORE_OF_OTHERS", "")  # as none
    assert "SLUICE" not in sluice(command, tmp_path / "nowhere")[2]
    monkeypatch.setenv("SLUICE_LIMITT", "3")
    assert "SLUICE_LIMITT" in sluice(command, tmp_path / "nowhere")[2]


def test_the_help_of_eval_is_of_scores(sluice):
    code, out, _ = sluice("eval", "--help")
    assert code == 0
    assert "are scored" in out
    assert "A training run" not in out


def test_the_example_of_a_run_has_held_out_tasks():
    config = load_config(cli.ScoredRunConfig, ["--config", str(ROOT / "examples" / "run.yaml")])
    ((name, dataset),) = config.evaluation.datasets.items()
    held_out = (ROOT / dataset.prompts.file).read_text().splitlines()
    trained = (ROOT / config.prompts.file).read_text().splitlines()
    assert name == "held_out"
    assert len(held_out) == dataset.groups == 64
    assert not set(held_out) & set(trained)


def test_ctrl_c_while_modules_load_ends_without_a_trace() -> None:
    code = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "sluice.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from sluice.__main__ import main
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("refuses", [False, True])
def test_texts_of_a_server_move_no_cursor(tmp_path: Path, refuses: bool) -> None:
    text = "[/b] \x1b]0;title\x07\x1b[2J"

    class Hostile(wait_service_pb2_grpc.WaitServiceServicer):
        def ListWaits(
            self, request: wait_service_pb2.ListWaitsRequest, context: grpc.ServicerContext
        ) -> wait_service_pb2.ListWaitsResponse:
            if refuses:
                context.abort(grpc.StatusCode.INTERNAL, text)
            wait = wait_service_pb2.Wait(what=text, on=[text], explanation=text)
            return wait_service_pb2.ListWaitsResponse(waits=[wait])

    server = grpc.server(ThreadPoolExecutor(2))
    wait_service_pb2_grpc.add_WaitServiceServicer_to_server(Hostile(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [sys.executable, "-m", "sluice.cli", "waits", f"127.0.0.1:{port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    server.stop(None)
    assert ended.returncode == (2 if refuses else 0), ended.stderr
    assert "[/b] \\x1b]0;title\\x07\\x1b[2J" in ended.stdout + ended.stderr
    assert not {"\x1b", "\x07"} & set(ended.stdout + ended.stderr)
