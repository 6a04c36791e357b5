#!/usr/bin/env python3
"""How far a GPU's losses lie from a CPU's, beside two CPU runs that differ only in how a batch is cut.

    scripts/bench/compare_devices.py --binary build/fp4train --recipe quickstart|moe160m|FILE [--out runs/devices]
                                     [--devices cpu,cuda] [--set A.B=VALUE]...

Runs one recipe with one seed three times, side by side: on the CPU, on the CPU with half the `micro_sequences`, on the
GPU. Prints the largest difference of the training losses over the first 20 steps, and of each held-out loss at every
evaluation of every stage. Allowed: 2e-3 nat over the 20 steps; at an evaluation the larger of 0.02 nat and twice the
difference of the CPU runs. Exits with 1 where a bound is missed; JSON in OUT/devices.json.

quickstart runs as it is. moe160m is cut to what some 16 cores do in 4 minutes: 2 sequences of 512 a step in place of
64, 30 steps, evaluations of 2048 tokens at steps 0, 10, 20 and 30, two steps of RL on 16 completions each; model,
precision, data and learning rates are the recipe's.
"""
import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS, STEP_NATS, EVALUATION_NATS = 20, 2e-3, 0.02
# What each recipe is run with, and the half of its micro-batch.
RECIPES = {
    "quickstart": ([], 8),
    "moe160m": ([
        "stages[0].pretrain.steps=30", "stages[0].pretrain.batch.tokens=1024",
        "stages[0].pretrain.batch.micro_sequences=2", "stages[0].pretrain.schedule.warmup=20",
        "stages[0].pretrain.eval.every=10", "stages[0].pretrain.eval.tokens=2048",
        "stages[0].pretrain.eval.max_tokens=4", "stages[1].rl.steps=2", "stages[1].rl.sampling.prompts=4",
        "stages[1].rl.sampling.samples=4", "stages[1].rl.objective.micro_tokens=512", "stages[1].rl.eval.every=1",
        "stages[1].rl.eval.tokens=2048", "stages[1].rl.eval.task_problems=16"], 1),
}


def start(options, name, device, threads, settings):
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    settings = [f"run.dir={folder}", "run.resume=never", f"run.device={device}", f"run.threads={threads}", *settings,
                *options.set]
    recipe = options.recipe if "/" in options.recipe else ROOT / "configs" / f"{options.recipe}.yaml"
    command = [options.binary, "--config", recipe, *(word for s in settings for word in ("--set", s))]
    print("+", " ".join(map(str, command)), flush=True)
    console = (folder / "console.txt").open("w", encoding="utf-8")
    return subprocess.Popen(list(map(str, command)), stdout=console, stderr=subprocess.STDOUT)


def figures(folder):
    """Training losses by step; held-out figures by (stage, step, name)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["loss"] for line in lines if line["kind"] == "step" and line["stage"] == "pretrain"}
    held_out = {(line["stage"], line["step"], key): value for line in lines if line["kind"] == "eval"
                for key, value in line.items() if key.startswith("loss.")}
    return steps, held_out


def compare(out, names):
    (cpu, cpu_held), (half, half_held), (other, other_held) = (figures(out / name) for name in names)
    first = sorted(cpu)[:STEPS]

    def worst(x):
        return max((abs(cpu[s] - x[s]), s) for s in first)

    rows = []
    for at in sorted(cpu_held, key=lambda a: (list(cpu_held).index(a))):
        apart = abs(cpu_held[at] - half_held[at])
        rows.append({"stage": at[0], "step": at[1], "loss": at[2], "cpu": cpu_held[at], "other": other_held[at],
                     "difference": abs(cpu_held[at] - other_held[at]), "between_cpu_runs": apart,
                     "allowed": max(EVALUATION_NATS, 2 * apart)})
    steps = {"first_steps": len(first), "difference": worst(other)[0], "at_step": worst(other)[1],
             "between_cpu_runs": worst(half)[0], "allowed": STEP_NATS}
    return steps, rows


def report(name, steps, rows):
    lines = [f"{name}: over the first {steps['first_steps']} steps the losses differ by at most {steps['difference']:.2g} "
             f"nat (step {steps['at_step']}; allowed {steps['allowed']:.2g}); those of the two CPU runs by "
             f"{steps['between_cpu_runs']:.2g}", "",
             "| stage, step | loss | CPU | GPU | difference | between CPU runs | allowed |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        lines.append(f"| {r['stage']}, {r['step']} | {r['loss']} | {r['cpu']:.4f} | {r['other']:.4f} "
                     f"| {r['difference']:.4f} | {r['between_cpu_runs']:.4f} | {r['allowed']:.4f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/fp4train")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--devices", default="cpu,cuda", help="the two that are compared")
    parser.add_argument("--half", type=int, help="micro_sequences of the second CPU run, for a recipe FILE")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    settings, half = RECIPES.get(options.recipe, ([], options.half))
    if half is None:
        parser.error("--half is needed with a recipe file")
    options.out = options.out or pathlib.Path("runs/devices") / pathlib.Path(options.recipe).stem
    first, second = options.devices.split(",")
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // 2)
    begin = time.monotonic()
    runs = {"cpu": start(options, "cpu", first, threads, settings),
            "half": start(options, "half", first, threads,
                          [*settings, f"stages[0].pretrain.batch.micro_sequences={half}"]),
            "other": start(options, "other", second, threads if second == "cpu" else 1, settings)}
    codes = {name: process.wait() for name, process in runs.items()}
    for name, code in codes.items():
        if code != 0:
            sys.stderr.write((options.out / name / "console.txt").read_text(encoding="utf-8", errors="replace")[-2000:])
            raise SystemExit(f"the run {options.out / name} ended with {code}")
    steps, rows = compare(options.out, list(runs))
    kept = steps["difference"] <= steps["allowed"] and all(r["difference"] <= r["allowed"] for r in rows)
    (options.out / "devices.json").write_text(json.dumps(
        {"recipe": options.recipe, "date": datetime.date.today().isoformat(), "command": sys.argv, "steps": steps,
         "evaluations": rows, "kept": kept}, indent=1))
    print(report(options.recipe, steps, rows))
    print(f"== {options.recipe}: {'within the bounds' if kept else 'NOT within the bounds'}, "
          f"{time.monotonic() - begin:.0f} s")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
