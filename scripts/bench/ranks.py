#!/usr/bin/env python3
"""Several GPUs of one host over one: tokens a second at the same work a GPU, and how much of a step ranks wait.

    scripts/bench/ranks.py --build build-gpu [--gpus N] [--recipe q6] [--steps 8] [--layouts one,data,expert,zero3]
                           [--tokens N] [--skip N] [--set KEY=VALUE ...] [--out ranks.json] [--links]

Trains the recipe of configs/bench on one GPU and on N, with N times the tokens, and times its steps by their console
lines, the first ones not (--skip); every run is killed after the last (a clean end would write a checkpoint). --links
also prints the rates of the communicator beside those that nccl_ceilings.py reaches (needs python3 with PyTorch, and
test_gpu_ranks_comm). With parallel.transport=host, ranks may share a GPU: that tries the script out, and measures
nothing else.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
# What a rank shares, and the ratio to one GPU that is the first goal and the last (two GPUs).
LAYOUTS = {"one": ([], None), "data": ([], (1.8, 1.95)), "expert": (["parallel.expert={n}"], (1.7, 1.92)),
           "zero3": (["parallel.zero=3"], None)}
STEP = re.compile(r"step=(\d+)/\d+ loss=(\S+) .*?(?:exposed=([\d.]+)%|$)")


def tokens_of(recipe):
    return int(re.search(r"batch: \{tokens: (\d+)", recipe.read_text(encoding="utf-8"))[1])


def processes():
    """Parent and state of every process, by /proc."""
    found = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has gone meanwhile
        found[int(stat.parent.name)] = (int(parent), state)
    return found


def end(process, seconds=60):
    """Kills a launcher and its ranks, which mpirun puts into groups of their own, and waits until they are gone: what
    they have of a GPU is free then."""
    all_processes, pids = processes(), [process.pid]
    for pid in pids:
        pids += [child for child, (parent, _) in all_processes.items() if parent == pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + seconds
    while any(pid in pids[1:] and state != "Z" for pid, (_, state) in processes().items()):
        if time.monotonic() > deadline:
            raise SystemExit(f"processes that do not end: {pids[1:]}")
        time.sleep(0.1)


def run(options, layout):
    recipe = ROOT / "configs/bench" / f"{options.recipe}.yaml"
    ranks = 1 if layout == "one" else options.gpus
    tokens = (options.tokens or tokens_of(recipe)) * ranks
    settings = [f"stages[0].pretrain.steps={options.steps + 1}", f"stages[0].pretrain.batch.tokens={tokens}",
                "run.device=cuda", *(s.format(n=ranks) for s in LAYOUTS[layout][0]), *options.set]
    with tempfile.TemporaryDirectory() as folder:
        command = [*(MPIRUN + ["-np", str(ranks)] if ranks > 1 else []), str(options.build / "fp4train"), "--config",
                   str(recipe), "--set", f"run.dir={folder}/run"]
        for setting in settings:
            command += ["--set", setting]
        print("+ " + " ".join(command), flush=True)
        times, losses, exposed, lines = [], [], [], []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              start_new_session=True) as process:
            try:
                for line in process.stdout:
                    lines.append(line)
                    match = STEP.search(line)
                    if not match:
                        continue
                    times.append(time.monotonic())
                    losses.append(float(match[2]))
                    exposed.append(float(match[3] or 0))
                    if len(times) == options.steps:
                        break
            finally:
                end(process)
    if len(times) < options.steps:
        raise SystemExit(f"{layout}: {len(times)} of {options.steps} steps\n" + "".join(lines[-20:]))
    seconds = statistics.median(b - a for a, b in zip(times[options.skip - 1:], times[options.skip:]))
    return {"layout": layout, "ranks": ranks, "tokens": tokens, "step_s": seconds, "tokens_per_s": tokens / seconds,
            "exposed_percent": statistics.median(exposed[options.skip:]), "losses": losses}


def rates(text):
    return {(m[1], int(m[2])): float(m[3]) for m in re.finditer(r"^(\w+) (\d+) MiB: .*?([\d.]+) GB/s", text, re.M)}


def links(options):
    comm = options.build / "tests/test_gpu_ranks_comm"
    ours = rates(subprocess.run([*MPIRUN, "-np", str(options.gpus), str(comm), "--gtest_filter=*rates*"],
                                capture_output=True, text=True, check=True).stdout)
    theirs = rates(subprocess.run(["python3", str(HERE / "nccl_ceilings.py")], capture_output=True, text=True,
                                  check=True).stdout)
    rows = [{"call": call, "MiB": mib, "ours": rate, "ceiling": theirs.get((call, mib))}
            for (call, mib), rate in ours.items()]
    for row in rows:
        ratio = f", {row['ours'] / row['ceiling']:.2f} of {row['ceiling']:.0f}" if row["ceiling"] else ""
        print(f"{row['call']} {row['MiB']} MiB: {row['ours']:.0f} GB/s{ratio}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, type=pathlib.Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--recipe", default="q6")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=2, help="steps that are not timed, at first")
    parser.add_argument("--tokens", type=int, help="a step and GPU, instead of the recipe's")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.skip < 2 or options.steps < options.skip + 2:
        parser.error("--skip: at least 2; --steps: at least 2 more")
    rows, one = [], None
    for layout in options.layouts.split(","):
        row = run(options, layout)
        rows.append(row)
        one = row if layout == "one" else one
        ratio = row["tokens_per_s"] / one["tokens_per_s"] if one else float("nan")
        goals = LAYOUTS[layout][1]
        print(f"{layout} on {row['ranks']}: {row['tokens_per_s']:.0f} tokens/s, {1e3 * row['step_s']:.1f} ms a step, "
              f"{ratio:.2f} of one GPU" + (f" (to reach: {goals[0]}, {goals[1]})" if goals else "")
              + f", exposed {row['exposed_percent']:.1f}%, loss {row['losses'][-1]:.4f}", flush=True)
    result = {"date": datetime.date.today().isoformat(), "rows": rows, "links": links(options) if options.links else []}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
