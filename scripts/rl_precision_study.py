#!/usr/bin/env python3
"""Reinforcement learning with sampler and trainer in several precisions, matched and mismatched; prints a table.

Every seed has one pretrained checkpoint (BF16, the text and task of the recipe), from which all of its arms branch, so
that they differ in the tables of the RL stage alone. An arm is SAMPLER/TRAINER[+option]:

    bf16/bf16        both in BF16
    w4a16/w4a16      weights of all blocks but the last in NVFP4, activations in BF16
    w4a4/w4a4        both operands in NVFP4, activations with a scale a row
    w4a16/bf16       the sampler alone in NVFP4: mismatched rows
    w4a4/bf16        the same with both operands; then without correction, with masks, with the sampler's routing

The backward multiplies in BF16 what the forward multiplied. Needs a built binary; results go to <out>, a run that is
finished is not run again.

    scripts/rl_precision_study.py --binary build/fp4train --recipe configs/quickstart.yaml --out runs/rl_study
    scripts/rl_precision_study.py --tiny    # two short arms, to see that it works
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

FIRST = "{module: [embed, head], format: bf16}, {layers: last 1, format: bf16}, "
ACT = "{module: '*', operand: act, format: nvfp4, scale_rule: four_over_six, scale_scope: row, scale_round: pow2}, "
WEIGHT = "{module: '*', operand: weight, format: nvfp4, scale_rule: four_over_six, scale_round: pow2}"
REST = ", {module: '*', format: bf16}"
ROWS = {
    "bf16": "[{module: '*', format: bf16}]",
    "w4a16": f"[{FIRST}{WEIGHT}{REST}]",
    "w4a4": f"[{FIRST}{ACT}{WEIGHT}]",
}
OPTIONS = {
    "off": ["mismatch={importance: off}"],
    "masks": ["mismatch={importance: raw, token_low: 0.5, token_high: 5, sequence_low: 0.9, sequence_high: 1.1}"],
    "replay": ["router_replay=sampler"],
}
ARMS = ["bf16/bf16", "w4a16/w4a16", "w4a4/w4a4", "w4a16/bf16", "w4a4/bf16", "w4a4/bf16+off", "w4a4/bf16+masks",
        "w4a4/bf16+replay"]
FIGURES = ["generation_kl", "rho_chi_square", "effective_share", "router_disagreement", "grad_norm"]
HEAD = ("| sampler/trainer | seed | sampled accuracy before RL | after RL | best | text, nats a byte | generation KL | "
        "E[rho^2] - 1 | effective share | routers that differ | gradient norm |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")


def call(command: list, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "console.txt", "w", encoding="utf-8") as console:
        done = subprocess.run(command, stdout=console, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}, see {folder}/console.txt")


def lines(folder: pathlib.Path, kind: str) -> list:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if r["kind"] == kind and r.get("stage") == "rl"]


def tables(sampler: str, trainer: str) -> list:
    """The RL tables of an arm; pretraining stays in BF16."""
    bf16 = ROWS["bf16"]
    source = "[{module: '*', format: bf16, source: forward}]" if trainer != "bf16" else bf16
    text = (f"{{pretrain.forward: {bf16}, pretrain.backward: {bf16}, rl.sampler: {ROWS[sampler]}, "
            f"rl.trainer.forward: {ROWS[trainer]}, rl.trainer.backward: {source}}}")
    return ["--set", f"precision={text}"]


def pretrained(options, seed: int) -> pathlib.Path:
    """The checkpoint at the end of pretraining, from a run whose RL stage is one step long."""
    folder = options.out / f"pretrained-{seed}"
    if not (folder / "summary.json").exists():
        call([options.binary, "--config", options.recipe, "--set", f"run.seed={seed}", "--set", f"run.dir={folder}",
              "--set", "stages.1.rl.steps=1", "--set", "stages.0.pretrain.checkpoint.keep=20", "--set",
              "stages.1.rl.checkpoint.keep=20", *tables("bf16", "bf16"), *options.short], folder)
    for manifest in sorted(folder.glob("checkpoints/*/manifest.json")):
        state = json.loads(manifest.read_text())["state"]
        if (state["stage"], state["step"], state["update"]) == (1, 0, 0):
            return manifest.parent
    sys.exit(f"no checkpoint between the stages in {folder}")


def run(options, arm: str, seed: int) -> pathlib.Path:
    folder = options.out / f"{arm.replace('/', '_')}-{seed}"
    if not (folder / "summary.json").exists():
        start = pretrained(options, seed)
        rows, _, option = arm.partition("+")
        more = [x for key in OPTIONS.get(option, []) for x in ("--set", f"stages.1.rl.objective.{key}")]
        call([options.binary, "--config", options.recipe, "--set", f"run.seed={seed}", "--set", f"run.dir={folder}",
              "--set", f"run.branch_from={start}", *tables(*rows.split("/")), *more, *options.short,
              *options.short_rl], folder)
    return folder


def row(arm: str, seed: int, folder: pathlib.Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    steps, evaluations = lines(folder, "step"), lines(folder, "eval")
    means = []
    for name in FIGURES:
        found = [s[name] for s in steps if name in s]
        means.append(f"{statistics.fmean(found):.3g}" if found else "")
    accuracies = [e["accuracy"] for e in evaluations if "accuracy" in e]
    return (f"| {arm} | {seed} | {accuracies[0]:.3f} | {accuracies[-1]:.3f} | {max(accuracies):.3f} | "
            f"{summary['text_loss_end']:.3f} | {' | '.join(means)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/fp4train")
    parser.add_argument("--recipe", default="configs/quickstart.yaml")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/rl_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--tiny", action="store_true", help="two arms, one seed, a few steps each")
    options = parser.parse_args()
    options.short = options.short_rl = []
    if options.tiny:
        options.seeds, options.arms = [1], ["bf16/bf16", "w4a4/bf16+replay"]
        options.out = options.out / "tiny"
        options.short = ["--set", "stages.0.pretrain.steps=10", "--set", "stages.0.pretrain.eval.tokens=512", "--set",
                         "stages.1.rl.eval.tokens=512", "--set", "stages.1.rl.eval.task_problems=8"]
        options.short_rl = ["--set", "stages.1.rl.steps=2"]
    print(HEAD)
    for arm in options.arms:
        for seed in options.seeds:
            print(row(arm, seed, run(options, arm, seed)), flush=True)


if __name__ == "__main__":
    main()
