#!/usr/bin/env python3
"""The table of the single-GPU benchmarks: ours beside PyTorch's in one run.

    scripts/bench/run.py --build build-gpu [--out bench.json] [--only gemm,grouped,attention,quantise,train,decode]

Needs the benchmarks (scripts/test_gpu.sh --build-dir build-gpu -DFP4T_BENCH=ON, then
cmake --build build-gpu --target gpu_benches) and a python3 with PyTorch. Ours and the baseline take turns; every row is
a median on random data. Prints the table and writes it as JSON with card, date and commit.
"""
import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TFLOPS = r"([\d.]+) TFLOP/s"

# Rows: (name, what is better than 1 says, first, goal), as the project's targets state them.
TARGETS = {
    "dense": (0.90, 0.98), "grouped": (1.0, 1.1), "attention forward": (0.65, 0.95), "attention backward": (0.5, 0.8),
    "quantise": (0.6, 0.85), "forward+backward": (1.0, 1.25), "optimizer step": (1.5, 2.0), "whole step": (1.15, 1.45),
    "emulated NVFP4 over own BF16": (0.75, 0.90), "decode BF16": (1.0, 1.45), "decode NVFP4": (1.8, 3.2),
}


def output_of(command, log):
    """Standard output of a command, also into the log; stops the run when it fails."""
    print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    log.append({"command": " ".join(map(str, command)), "output": done.stdout, "errors": done.stderr[-2000:]})
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{command[0]} failed with {done.returncode}")
    return done.stdout


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


class Bench:
    def __init__(self, build):
        self.build = pathlib.Path(build)
        self.log, self.rows = [], []

    def binary(self, name):
        return self.build / "tests" / "bench" / f"bench_gpu_{name}"

    def add(self, kind, name, ours, theirs, unit, better="more"):
        ratio = ours / theirs if better == "more" else theirs / ours
        first, goal = TARGETS[kind]
        self.rows.append({"kind": kind, "row": name, "ours": ours, "baseline": theirs, "unit": unit,
                          "ratio": ratio, "first": first, "goal": goal})

    def gemm(self):
        for line in output_of([self.binary("gemm"), "dense"], self.log).splitlines():
            m = re.match(rf"(\S.*?)\s+dense .*?{TFLOPS}\s+cuBLASLt\s+[\d.]+ ms\s+([\d.]+)", line)
            if m:
                self.add("dense", m[1], float(m[2]), float(m[3]), "TFLOP/s")

    def grouped(self):
        theirs = {}
        for line in output_of(["python3", HERE / "torch_grouped.py"], self.log).splitlines():
            m = re.match(rf"torch._grouped_mm (.*?)\s+[\d.]+ ms\s+{TFLOPS}", line)
            if m:
                theirs[m[1]] = float(m[2])
        for line in output_of([self.binary("gemm"), "grouped"], self.log).splitlines():
            m = re.match(rf"(\S.*?), even\s+[mk]-grouped .*? (bf16|f32|f32 \+=) G\d+\s+[\d.]+ ms\s+{TFLOPS}", line)
            if m and m[1] in theirs:
                self.add("grouped", f"{m[1]}, out {m[2]}", float(m[3]), theirs[m[1]], "TFLOP/s")

    def attention(self):
        shape = "4 x 4096, heads 32/32 x 128"
        ours = output_of([self.binary("attention")], self.log)
        theirs = output_of(["python3", HERE / "ceilings.py", "--only", "attention"], self.log)
        cudnn = re.search(rf"CUDNN_ATTENTION .*?forward ([\d.]+), backward ([\d.]+)", theirs)
        for k, pass_name in enumerate(("forward", "backward")):
            m = re.search(rf"{pass_name}\s+{re.escape(shape)}\s+[\d.]+ ms\s+{TFLOPS}", ours)
            self.add(f"attention {pass_name}", shape, float(m[1]), float(cudnn[k + 1]), "TFLOP/s")

    def quantise(self):
        text = output_of([self.binary("quantize")], self.log)
        copy = float(re.search(r"copy, read \+ written: ([\d.]+) TB/s", text)[1])
        for m in re.finditer(r"^(.*?)\s+[\d.]+ us\s+([\d.]+) TB/s", text, re.M):
            self.add("quantise", m[1].strip(), float(m[2]), copy, "TB/s")

    def model(self, recipe, *options):
        return json_lines(output_of([self.binary("model"), ROOT / "configs" / "bench" / f"{recipe}.yaml", *options],
                                    self.log))

    def train(self):
        geometry = {"q6": [], "m2": ["--heads", "16", "--experts", "32", "--top-k", "4", "--ffn", "1024",
                                     "--layers", "12"]}
        for recipe, arguments in geometry.items():
            ours = self.model(recipe, "--only", "train")[-1]
            theirs = json_lines(output_of(["python3", HERE / "torch_moe.py", "--only", "train", "--batch", "8",
                                           *arguments], self.log))[-1]
            name = f"{recipe.upper()}, {ours['tokens']} tokens"
            self.add("forward+backward", name, ours["tokens_per_s_fwd_bwd"], theirs["tokens_per_s_fwd_bwd"], "tokens/s")
            self.add("optimizer step", name, ours["optimizer_ms"], theirs["optimizer_ms"], "ms", better="less")
            self.add("whole step", name, ours["tokens_per_s"], theirs["tokens_per_s"], "tokens/s")
            emulated = self.model(recipe, "--only", "train", "--set", "precision.preset=nvidia_nvfp4")[-1]
            self.add("emulated NVFP4 over own BF16", name, emulated["tokens_per_s"], ours["tokens_per_s"], "tokens/s")

    def decode(self):
        theirs = {line["batch"]: line["tokens_per_s"]
                  for line in json_lines(output_of(["python3", HERE / "torch_moe.py", "--only", "decode"], self.log))}
        for kind, options in (("decode BF16", []), ("decode NVFP4", ["--set", "precision.preset=rl_nvfp4"])):
            for line in self.model("q6", "--only", "decode", *options):
                self.add(kind, f"Q6, batch {line['batch']}", line["tokens_per_s"], theirs[line["batch"]], "tokens/s")

    def table(self):
        lines = ["| what | row | ours | baseline | ratio | first | goal |", "| --- | --- | --- | --- | --- | --- | --- |"]
        for r in self.rows:
            lines.append(f"| {r['kind']} | {r['row']} | {r['ours']:.4g} {r['unit']} | {r['baseline']:.4g} {r['unit']} "
                         f"| {r['ratio']:.2f} | {r['first']} | {r['goal']} |")
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="the build folder")
    parser.add_argument("--out", default="bench.json")
    parser.add_argument("--only", default="gemm,grouped,attention,quantise,train,decode")
    arguments = parser.parse_args()
    bench = Bench(arguments.build)
    for part in arguments.only.split(","):
        getattr(bench, part)()
    card = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True,
                          check=True).stdout.splitlines()[0]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip() or "unknown"
    date = datetime.date.today().isoformat()
    pathlib.Path(arguments.out).write_text(json.dumps(
        {"card": card, "date": date, "commit": commit, "rows": bench.rows, "log": bench.log}, indent=1))
    print(f"{card}, {date}, commit {commit}\n\n{bench.table()}")


if __name__ == "__main__":
    main()
