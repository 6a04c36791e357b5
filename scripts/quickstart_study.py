#!/usr/bin/env python3
"""Runs the quickstart over seeds and arms and prints the table that the root README shows.

With --readme FILE it also puts the table in the place of the one between that file's markers "quickstart results";
what is said below the table there (commit, date, machine) stays, and is the writer's to bring up to date.

Arms: `quickstart` (the recipe as it is), `bf16` (the same recipe, every cell in BF16) and `permuted`
(reinforcement learning from the quickstart's own pretrained checkpoint, rewards shuffled over all
completions of a step: the control that must not learn). Needs a built binary; results go to
<out>/<arm>-<seed>/summary.json, a run that is finished is not run again.

    scripts/quickstart_study.py --binary build/fp4train --out runs/study [--seeds 1 2 3] [--arms ...] [--readme README.md]
"""
import argparse
import json
import math
import pathlib
import re
import subprocess
import sys

RECIPE = "configs/quickstart.yaml"
BEGIN, END = "<!-- quickstart results: begin -->", "<!-- quickstart results: end -->"
ARMS = {"quickstart": "quickstart, 4 bits", "bf16": "the same in BF16", "permuted": "rewards permuted"}
HEAD = ("| run | seed | sampled accuracy before RL (95%) | after RL (95%) | greedy | held-out text, nats a byte | "
        "equal log-probabilities, least of all steps |\n| --- | --- | --- | --- | --- | --- | --- |")
KEEP = ["--set", "stages.0.pretrain.checkpoint.keep=20", "--set", "stages.1.rl.checkpoint.keep=20"]


def wilson(share: float, n: int) -> tuple:
    """95% score interval of a share of n draws."""
    z = 1.96
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return centre - half, centre + half


def boundary_checkpoint(run_dir: pathlib.Path) -> pathlib.Path:
    """The checkpoint between pretraining and reinforcement learning."""
    for manifest in sorted(run_dir.glob("checkpoints/*/manifest.json")):
        state = json.loads(manifest.read_text())
        counters = state.get("state", state)
        if counters.get("stage") == 1 and counters.get("step") == 0 and counters.get("update") == 0:
            return manifest.parent
    sys.exit(f"no checkpoint between the stages in {run_dir}")


def run(binary: str, out: pathlib.Path, arm: str, seed: int) -> dict:
    run_dir = out / f"{arm}-{seed}"
    if not (run_dir / "summary.json").exists():
        command = [binary, "--config", RECIPE, *KEEP, "--set", f"run.seed={seed}", "--set", f"run.dir={run_dir}"]
        if arm == "bf16":
            command += ["--set", "precision={preset: bf16}"]
        if arm == "permuted":
            start = boundary_checkpoint(out / f"quickstart-{seed}")
            command += ["--set", f"run.branch_from={start}", "--set", "stages.1.rl.task.permute_rewards=true"]
        run_dir.mkdir(parents=True, exist_ok=True)
        with open(run_dir / "console.txt", "w", encoding="utf-8") as console:
            subprocess.run(command, stdout=console, stderr=subprocess.STDOUT, check=True)
    return json.loads((run_dir / "summary.json").read_text())


def num_samples(run_dir: pathlib.Path) -> int:
    """Draws behind a sampled accuracy: held-out problems, as measured, times the recipe's task_samples."""
    problems = [json.loads(line).get("problems") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    samples = re.search(r"^ *task_samples: *(\d+)$", (run_dir / "recipe.yaml").read_text(), re.M)
    measured = [p for p in problems if p is not None]
    if not measured or not samples:
        sys.exit(f"no accuracy was measured in {run_dir}")
    return int(measured[-1]) * int(samples.group(1))


def row(arm: str, seed: int, s: dict, samples: int) -> str:
    def share(key):
        low, high = wilson(s[key], samples)
        return f"{s[key]:.3f} ({low:.3f}–{high:.3f})"

    return (f"| {ARMS[arm]} | {seed} | {share('accuracy_before_rl')} | {share('accuracy_after_rl')} | "
            f"{s['greedy_accuracy_before_rl']:.3f} → {s['greedy_accuracy_after_rl']:.3f} | "
            f"{s['text_loss_after_pretraining']:.3f} → {s['text_loss_end']:.3f} | "
            f"{s['logprob_equal_fraction_min']:.10g} |")


def fill(readme: pathlib.Path, rows: list) -> None:
    """The table between the markers becomes these rows; the text below it stays."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    inside, mark, after = rest.partition(END)
    if not mark:
        sys.exit(f"{readme} has no markers {BEGIN} and {END}")
    said = [line for line in inside.strip("\n").split("\n") if not line.startswith("|")]
    table = "\n".join([HEAD, *rows, *said])
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/fp4train")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--readme", type=pathlib.Path, help="put the table into this file, between its markers")
    options = parser.parse_args()
    print(HEAD)
    rows = []
    for arm in options.arms:
        for seed in options.seeds:
            summary = run(options.binary, options.out, arm, seed)
            rows.append(row(arm, seed, summary, num_samples(options.out / f"{arm}-{seed}")))
            print(rows[-1], flush=True)
    if options.readme:
        fill(options.readme, rows)


if __name__ == "__main__":
    main()
