#!/usr/bin/env python3
"""Reinforcement learning with sampler and trainer in several precisions, matched and mismatched; prints a table.

Every seed has one pretrained checkpoint (BF16, the text and task of the recipe), from which all of its arms branch, so
that they differ in the tables of the RL stage alone. An arm is SAMPLER/TRAINER[+option]:

    bf16/bf16        both in BF16
    w4a16/w4a16      weights of all blocks but the last in NVFP4, activations in BF16
    w4a4/w4a4        both operands in NVFP4, activations with a scale a row
    w4a16/bf16       the sampler alone in NVFP4: mismatched rows
    w4a4/bf16        the same with both operands; then without correction, with masks, with the sampler's routing
    ...+kv8          keys and values cached in MXFP8, which the trainer's forward rounds as the cache does

The backward multiplies in BF16 what the forward multiplied. Needs a built binary; results go to <out>, a run that is
finished is not run again. --jobs runs so many side by side, --set changes a key in all of them. A second table has the
means over the seeds, with the least and the largest.

    scripts/rl_precision_study.py --binary build/fp4train --recipe configs/quickstart.yaml --out runs/rl_study
    scripts/rl_precision_study.py --binary build-gpu/fp4train --jobs 6 --set run.device=cuda    # one GPU
    scripts/rl_precision_study.py --tiny    # two short arms, to see that it works
"""
import argparse
import concurrent.futures
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
    "kv8": [],
}
ARMS = ["bf16/bf16", "bf16/bf16+kv8", "w4a16/w4a16", "w4a4/w4a4", "w4a4/w4a4+kv8", "w4a16/bf16", "w4a4/bf16",
        "w4a4/bf16+off", "w4a4/bf16+masks", "w4a4/bf16+replay"]
# Of a step's metrics, as means over the stage; the KL also over its last tenth, since it may grow.
FIGURES = {"generation KL": "generation_kl", "E[rho^2] - 1": "rho_chi_square", "effective share": "effective_share",
           "routers that differ": "router_disagreement", "gradient norm": "grad_norm"}
COLUMNS = ["sampled accuracy before RL", "after RL", "best", "greedy after RL", "text, nats a byte",
           "equal log-probabilities", *FIGURES, "generation KL, last tenth"]


def call(words: list, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "console.txt", "w", encoding="utf-8") as console:
        done = subprocess.run(words, stdout=console, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: exit code {done.returncode}, see {folder}/console.txt")


def lines(folder: pathlib.Path, kind: str) -> list:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if r["kind"] == kind and r.get("stage") == "rl"]


def tables(sampler: str, trainer: str, option: str = "") -> list:
    """The RL tables of an arm; pretraining stays in BF16."""
    bf16 = ROWS["bf16"]
    cache = "{module: kv_cache, format: mxfp8}, " if option == "kv8" else ""
    source = "[{module: '*', format: bf16, source: forward}]" if trainer != "bf16" else bf16
    text = (f"{{pretrain.forward: {bf16}, pretrain.backward: {bf16}, rl.sampler: [{cache}{ROWS[sampler][1:]}, "
            f"rl.trainer.forward: {ROWS[trainer]}, rl.trainer.backward: {source}}}")
    return ["--set", f"precision={text}"]


def command(options, seed: int, folder: pathlib.Path) -> list:
    given = [x for setting in options.set for x in ("--set", setting)]
    own = ["--set", f"run.seed={seed}", "--set", f"run.dir={folder}"]
    return [options.binary, "--config", options.recipe, *given, *own]


def pretrained(options, seed: int) -> pathlib.Path:
    """The checkpoint at the end of pretraining, from a run whose RL stage is one step long."""
    folder = options.out / f"pretrained-{seed}"
    if not (folder / "summary.json").exists():
        call([*command(options, seed, folder), "--set", "stages.1.rl.steps=1", "--set",
              "stages.0.pretrain.checkpoint.keep=20", "--set", "stages.1.rl.checkpoint.keep=20",
              *tables("bf16", "bf16"), *options.short], folder)
    for manifest in sorted(folder.glob("checkpoints/*/manifest.json")):
        state = json.loads(manifest.read_text())["state"]
        if (state["stage"], state["step"], state["update"]) == (1, 0, 0):
            return manifest.parent
    raise RuntimeError(f"no checkpoint between the stages in {folder}")


def run(options, arm: str, seed: int) -> pathlib.Path:
    folder = options.out / f"{arm.replace('/', '_')}-{seed}"
    if not (folder / "summary.json").exists():
        start = pretrained(options, seed)
        rows, _, option = arm.partition("+")
        more = [x for key in OPTIONS.get(option, []) for x in ("--set", f"stages.1.rl.objective.{key}")]
        call([*command(options, seed, folder), "--set", f"run.branch_from={start}",
              *tables(*rows.split("/"), option), *more, *options.short, *options.short_rl], folder)
    return folder


def mean(values: list):
    return statistics.fmean(values) if values else None


def figures(folder: pathlib.Path) -> dict:
    """The table's columns of a run; None where the run has no such figure."""
    summary = json.loads((folder / "summary.json").read_text())
    steps, evaluations = lines(folder, "step"), [e for e in lines(folder, "eval") if "accuracy" in e]
    accuracies = [e["accuracy"] for e in evaluations]
    kl = [s["generation_kl"] for s in steps]
    values = [accuracies[0], accuracies[-1], max(accuracies), evaluations[-1]["accuracy_greedy"],
              summary["text_loss_end"], mean([s["logprob_equal_fraction"] for s in steps]),
              *(mean([s[name] for s in steps if name in s]) for name in FIGURES.values()),
              mean(kl[-max(1, len(kl) // 10):])]
    return dict(zip(COLUMNS, values))


def cell(column: str, value) -> str:
    exact = column.startswith(("sampled", "after", "best", "greedy", "text"))
    return "" if value is None else f"{value:.3f}" if exact else f"{value:.3g}"


def head(first: list) -> str:
    return f"| {' | '.join(first + COLUMNS)} |\n|{' --- |' * (len(first) + len(COLUMNS))}"


def means(arm: str, runs: list) -> str:
    """An arm over its seeds: mean (least to largest)."""
    cells = []
    for column in COLUMNS:
        values = [r[column] for r in runs if r[column] is not None]
        spread = f" ({cell(column, min(values))} to {cell(column, max(values))})" if len(values) > 1 else ""
        cells.append(cell(column, mean(values)) + spread)
    return f"| {arm} | {' | '.join(cells)} |"


def print_tables(options, pool: concurrent.futures.Executor) -> None:
    list(pool.map(lambda seed: pretrained(options, seed), options.seeds))
    table = {(arm, seed): pool.submit(run, options, arm, seed) for arm in options.arms for seed in options.seeds}
    print(head(["sampler/trainer", "seed"]))
    found, failures = {}, []
    for (arm, seed), job in table.items():
        try:
            result = figures(job.result())
        except RuntimeError as failure:  # of one run: the others' rows stand
            failures.append(str(failure))
            continue
        found.setdefault(arm, []).append(result)
        cells = [cell(column, value) for column, value in result.items()]
        print(f"| {arm} | {seed} | {' | '.join(cells)} |", flush=True)
    print(f"\n{head(['sampler/trainer, mean over seeds'])}")
    for arm, runs in found.items():
        print(means(arm, runs))
    if failures:
        sys.exit("\n".join(failures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/fp4train")
    parser.add_argument("--recipe", default="configs/quickstart.yaml")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/rl_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe, in all runs")
    parser.add_argument("--tiny", action="store_true", help="two arms, one seed, a few steps each")
    options = parser.parse_args()
    options.short = options.short_rl = []
    if options.tiny:
        options.seeds, options.arms = [1], ["bf16/bf16", "w4a4/bf16+replay"]
        options.out = options.out / "tiny"
        options.short = ["--set", "stages.0.pretrain.steps=10", "--set", "stages.0.pretrain.eval.tokens=512", "--set",
                         "stages.1.rl.eval.tokens=512", "--set", "stages.1.rl.eval.task_problems=8"]
        options.short_rl = ["--set", "stages.1.rl.steps=2"]
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
    try:
        print_tables(options, pool)
    except RuntimeError as failure:  # of a pretraining, without which nothing is left to do
        sys.exit(str(failure))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted study starts nothing more


if __name__ == "__main__":
    main()
