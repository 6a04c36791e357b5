#!/usr/bin/env python3
"""Predictions of large systems: the tables of engine/plan/README.md, from what `fp4train plan --json` prints.

Between the page's two marks stand the tables that this program makes; --write puts them there, --check compares and
exits with 1 where they differ. --up-to N leaves out rows of more ranks, for a quick look.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "engine/plan/README.md"
BEGIN, END = "<!-- predictions: begin -->\n", "<!-- predictions: end -->\n"
RANKS = (72, 576, 4608)
# Recipe, machine, what is changed: fast domains of hosts of eight have eight ranks, which share experts at most; smaller
# memories share more.
SYSTEMS = (("moe-30b-a3b", "gb300", []), ("moe-30b-a3b", "gb200", []), ("moe-30b-a3b", "h200", ["parallel.domain=8"]),
           ("moe-276b-a12b", "gb300", []), ("moe-276b-a12b", "gb200", ["parallel.zero=2"]),
           ("moe-276b-a12b", "h200", ["parallel.expert=8", "parallel.domain=8"]))
HEAD = ("| ranks | GiB a rank | step, s | of it exposed communication | tok/s | tok/s a rank | of the BF16 peak | GB sent a rank: near, far "
        "| RL step, s | RL tok/s a rank |\n" + "| --- " * 10 + "|\n")


def plan(binary, recipe, machine, overrides, ranks):
    command = [binary, "plan", "--config", f"configs/scale/{recipe}.yaml", "--machine", machine, "--ranks", str(ranks),
               "--json"]
    for override in overrides:
        command += ["--set", override]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def row(ranks, made):
    memory = sum(arena["bytes"] for arena in made["memory"].values()) / 2**30
    prediction = made["prediction"]
    first = f"| {ranks:,} | {memory:.0f}"
    if not prediction["fits"]:
        return first + ": does not fit" + " |" * 9 + "\n"
    pretrain, rl = prediction["stages"]
    near = sum(line["inside_bytes"] for line in pretrain["wire"]) / 1e9
    far = sum(line["outside_bytes"] for line in pretrain["wire"]) / 1e9
    cells = [first, f"{pretrain['step_ms'] / 1e3:.2f}", f"{pretrain['exposed_ms'] / 1e3:.2f}",
             f"{pretrain['tokens_per_s']:,.0f}", f"{pretrain['tokens_per_s_rank']:,.0f}",
             f"{pretrain['mfu'] * 100:.0f}%", f"{near:.0f}, {far:.0f}", f"{rl['step_ms'] / 1e3:.1f}",
             f"{rl['tokens_per_s_rank']:,.0f}"]
    return " | ".join(cells) + " |\n"


def tables(binary, up_to):
    text = ""
    for recipe, machine, overrides in SYSTEMS:
        of = "".join(f" --set {o}" for o in overrides)
        command = f"`fp4train plan --config configs/scale/{recipe}.yaml --machine {machine}{of} --ranks N`"
        text += textwrap.fill(command, 120, break_long_words=False, break_on_hyphens=False) + "\n\n" + HEAD
        for ranks in RANKS:
            if ranks <= up_to:
                text += row(ranks, plan(binary, recipe, machine, overrides, ranks))
        text += "\n"
    return text


def without_larger(text, up_to):
    return "".join(line for line in text.splitlines(True)
                   if not any(line.startswith(f"| {ranks:,} |") for ranks in RANKS if ranks > up_to))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--up-to", type=int, default=max(RANKS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    made = tables(options.binary, options.up_to)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    stands, after = rest.split(END)
    if options.write:
        PAGE.write_text(before + BEGIN + made + END + after, encoding="utf-8")
    elif options.check:
        if without_larger(stands, options.up_to) != made:
            sys.exit(f"{PAGE.relative_to(ROOT)} does not stand as the program predicts; {sys.argv[0]} --write")
        print("the tables stand as the program predicts")
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
