"""`python -m tools.accelerator_check [--wheels DIR] [--steps NAME,...] [--out DIR]`.

Checks the system on the device that torch finds: right figures, speed, recovery. Ends with one
line of figures; everything is in accelerator.json and accelerator.md below --out. Called again
with the same --out it runs only what is not done yet. Exit status 0 where every step is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.accelerator_check.packages import ROOT, WheelError, unpack
from tools.accelerator_check.report import CheckReport
from tools.accelerator_check.runner import StepRunner
from tools.accelerator_check.steps import STEPS
from tools.accelerator_check.work import Form

SECONDS: dict[Form, float] = {"full": 530.0, "small": 1800.0}  # for all steps together
CPU = "cpu"
SMALL_JOBS = 3  # at once: much of a demo is waiting


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(arguments)
    out: Path = flags.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT)]
    if flags.wheels is not None:
        try:
            unpack(flags.wheels, out / "packages")
        except WheelError as error:
            print(f"--wheels: {error}", file=sys.stderr)
            return 2
        paths.append(str(out / "packages"))
        sys.path.insert(0, paths[-1])
    # what the wheels bring goes before what is installed: it is known to fit together
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {"PYTHONPATH": os.pathsep.join([*paths, *inherited]), "PYTHONUNBUFFERED": "1"}
    environment |= {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1"}

    def runner(form: Form, device: str) -> StepRunner:
        seconds = flags.seconds or SECONDS[form]
        if form == "small":  # several at once
            environment.setdefault("OMP_NUM_THREADS", "1")
        return StepRunner(out, form, device, seconds=seconds, environment=environment)

    named = {step.name: step for step in STEPS}
    first, rest = STEPS[0], [step for step in STEPS[1:] if step.name in flags.steps]
    results = runner("small", "").run([first])
    device = str(results[0].figures.get("device", CPU))
    form: Form = flags.form or ("small" if device == CPU else "full")
    if form == "full":
        results += runner(form, device).run(rest)
    else:  # nothing is measured: the longest first, so that none is left over in the end
        longest = sorted(rest, key=lambda step: -step.seconds)
        found = runner(form, device).run(longest, SMALL_JOBS)
        results += sorted(found, key=lambda result: rest.index(named[result.name]))
    report = CheckReport(device, form, _command(arguments), results)
    report.write(out)
    print(report.line, flush=True)
    return 0 if report.done == len(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.accelerator_check", description=__doc__.partition("\n")[2]
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--wheels", type=Path, help="folder of `make accelerator-wheels`")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=names,
        metavar="NAME,...",
        help=f"of {', '.join(names)}; the first always runs",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "accelerator")
    parser.add_argument("--form", choices=("small", "full"), help="default: small on a CPU")
    parser.add_argument("--seconds", type=float, help="for all steps; default: 530")
    return parser


def _steps(text: str) -> list[str]:
    known = {step.name for step in STEPS}
    chosen = [name for name in text.split(",") if name]
    if unknown := [name for name in chosen if name not in known]:
        raise argparse.ArgumentTypeError(f"no step is called {', '.join(unknown)}")
    return chosen


def _command(arguments: Sequence[str] | None) -> str:
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", "tools.accelerator_check", *given])


if __name__ == "__main__":
    sys.exit(main())
