#!/usr/bin/env python3
"""The table of the single-GPU benchmarks: ours beside PyTorch's in one run.

    scripts/bench/run.py --build build-gpu [--out bench.json] [--only start,losses,gemm,...] [--skip ...]

Needs the benchmarks (scripts/test_gpu.sh --build-dir build-gpu -DFP4T_BENCH=ON, then
cmake --build build-gpu --target gpu_benches fp4train) and a python3 with PyTorch. Ours and the baseline take turns on one
card; every row is a median on random data. Several GPUs share out the parts, a part stays on its card. Prints the
table and writes it as JSON with card, date, commit and every command's output. A part that fails is named at the end, and
the exit status is 1; rows below a target are no failure.
"""
import argparse
import datetime
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from rows import Rows  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TFLOPS = r"([\d.]+) TFLOP/s"
# The recipes' geometries as torch_moe.py takes them: Q6 is its default.
GEOMETRY = {"q6": [], "m2": ["--heads", "16", "--experts", "32", "--top-k", "4", "--ffn", "1024", "--layers", "12"]}
LOSSES = 10
# The sampler whose log-probabilities equal the trainer's, and two without that promise: dense products in whatever order
# is fastest, and one scale for all of a call's activations, not rounded to a power of two.
EQUAL = ["--set", "precision.preset=rl_nvfp4"]
NOT_EQUAL = [EQUAL + ["--any-order"],
             ["--set", "precision={preset: rl_nvfp4, override: {rl.sampler: "
              "[{module: 'experts.*', format: nvfp4, scale_rule: four_over_six, scale_scope: tensor}]}}"]]


class Bench:
    def __init__(self, build, limit):
        self.build, self.limit = pathlib.Path(build), limit
        self.rows, self.log, self.lock = Rows(), [], threading.Lock()
        self.card = threading.local()

    def environment(self):
        return dict(os.environ, CUDA_VISIBLE_DEVICES=self.card.index)

    def output_of(self, *command):
        """Standard output of a command, also into the log; an exception when it fails."""
        command = list(map(str, command))
        print(f"+ GPU {self.card.index}: {' '.join(command)}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment(),
                              timeout=self.limit)
        with self.lock:
            self.log.append({"command": " ".join(command), "seconds": round(time.monotonic() - begin, 1),
                             "output": done.stdout, "errors": done.stderr[-2000:]})
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout

    def json_lines(self, *command):
        return [json.loads(line) for line in self.output_of(*command).splitlines() if line.startswith("{")]

    def binary(self, name):
        return self.build / "tests" / "bench" / f"bench_gpu_{name}"

    def model(self, recipe, *options):
        return self.json_lines(self.binary("model"), ROOT / "configs" / "bench" / f"{recipe}.yaml", *options)

    def torch(self, *options):
        return self.json_lines("python3", HERE / "torch_moe.py", *options)

    # Parts: each prints nothing and adds its rows.
    def start(self):
        """Seconds from the program's start to the end of the first optimizer step."""
        with tempfile.TemporaryDirectory() as folder:
            command = [str(self.build / "fp4train"), "--config", str(ROOT / "configs/bench/q6.yaml"),
                       "--set", f"run.dir={folder}/run", "--set", "run.device=cuda"]
            begin = time.monotonic()
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  env=self.environment()) as process:
                lines, seconds = [], None
                for line in process.stdout:
                    lines.append(line)
                    if re.match(r"pretrain step=1/", line):
                        seconds = time.monotonic() - begin
                        break
                process.kill()  # a clean stop would write 60 GB of checkpoint
        with self.lock:
            self.log.append({"command": " ".join(command), "seconds": seconds, "output": "".join(lines[-20:]),
                             "errors": ""})
        if seconds is None:
            raise RuntimeError("no first step: " + "".join(lines[-5:]))
        self.rows.seconds("start", "Q6, start of the program to its first step's line", seconds)

    def losses(self):
        """Both sides from the same weights and tokens, two layers: the first ten losses."""
        for recipe, geometry in GEOMETRY.items():
            with tempfile.TemporaryDirectory() as folder:
                dump = f"{folder}/{recipe}"
                ours = self.model(recipe, "--only", "train", "--iters", "1", "--losses", LOSSES, "--dump", dump,
                                  "--set", "model.layers=2", "--set", "stages[0].pretrain.optimizer.learning_rate=1e-4")
                theirs = self.torch("--only", "train", "--iters", "1", "--losses", LOSSES, "--batch", "8", "--eager",
                                    *geometry, "--layers", "2", "--weights", f"{dump}.weights.safetensors",
                                    "--tokens", f"{dump}.tokens.safetensors")
            pairs = [([line["loss"] for line in side if line["what"] == "loss"]) for side in (ours, theirs)]
            self.rows.losses(f"{recipe.upper()}, 2 layers, same weights and tokens", *pairs)

    def gemm(self):
        for line in self.output_of(self.binary("gemm"), "dense").splitlines():
            m = re.match(rf"(\S.*?)\s+dense (.*?)\s+[\d.]+ ms\s+{TFLOPS}\s+cuBLASLt\s+[\d.]+ ms\s+([\d.]+)", line)
            if m:
                self.rows.ratio("dense", f"{m[1]}, {m[2]}", float(m[3]), float(m[4]), "TFLOP/s")

    def grouped(self):
        theirs = {}
        for line in self.output_of("python3", HERE / "torch_grouped.py").splitlines():
            m = re.match(rf"torch._grouped_mm (.*?)\s+[\d.]+ ms\s+{TFLOPS}", line)
            if m:
                theirs[m[1]] = float(m[2])
        for line in self.output_of(self.binary("gemm"), "grouped").splitlines():
            m = re.match(rf"(\S.*?), even\s+[mk]-grouped .*? (bf16|f32|f32 \+=) G\d+\s+[\d.]+ ms\s+{TFLOPS}", line)
            if m and m[1] in theirs:
                kind = "grouped" if m[2] == "bf16" else "grouped, others"  # PyTorch writes BF16
                self.rows.ratio(kind, f"{m[1]}, out {m[2]}", float(m[3]), theirs[m[1]], "TFLOP/s")

    def attention(self):
        shape = "4 x 4096, heads 32/32 x 128"
        ours = self.output_of(self.binary("attention"))
        theirs = self.output_of("python3", HERE / "ceilings.py", "--only", "attention")
        cudnn = re.search(r"CUDNN_ATTENTION .*?forward ([\d.]+), backward ([\d.]+)", theirs)
        for k, pass_name in enumerate(("forward", "backward")):
            m = re.search(rf"{pass_name}\s+{re.escape(shape)}\s+[\d.]+ ms\s+{TFLOPS}", ours)
            self.rows.ratio(f"attention {pass_name}", shape, float(m[1]), float(cudnn[k + 1]), "TFLOP/s")

    def quantise(self):
        text = self.output_of(self.binary("quantize"), "32768", "2048")
        copy = float(re.search(r"copy, read \+ written: ([\d.]+) TB/s", text)[1])
        for m in re.finditer(r"^(\S.*?)\s+(\d+ x\s+\d+)\s+[\d.]+ us\s+once ([\d.]+)", text, re.M):
            both = m[1] == "the same together"
            name = "row stochastic + column stochastic rotated 16, together" if both else m[1]
            self.rows.ratio("quantise" if both else "quantise, others", f"{name}, {m[2]}", float(m[3]) * copy, copy, "TB/s")

    def train_rows(self, name, ours, theirs):
        def with_loss(side):
            return {"loss": side["loss"]}
        self.rows.ratio("forward+backward", name, ours["tokens_per_s_fwd_bwd"], theirs["tokens_per_s_fwd_bwd"], "tokens/s",
                        ours=with_loss(ours), theirs=with_loss(theirs), largest_load=ours["largest_load"])
        self.rows.ratio("optimizer step", name, theirs["optimizer_ms"], ours["optimizer_ms"], "ms", swapped=True)
        self.rows.ratio("whole step", name, ours["tokens_per_s"], theirs["tokens_per_s"], "tokens/s")

    def train(self, recipe):
        geometry = [*GEOMETRY[recipe], "--batch", "8"]
        ours = self.model(recipe, "--only", "train")[-1]
        theirs = self.torch("--only", "train", *geometry)[-1]
        name = f"{recipe.upper()}, {ours['tokens']} tokens"
        self.train_rows(name, ours, theirs)
        self.rows.ratio("memory", name, ours["arenas_GiB"] + ours["workspace_GiB"], theirs["peak_mem_GiB"], "GiB")
        emulated = self.model(recipe, "--only", "train", "--set", "precision.preset=nvidia_nvfp4")[-1]
        again = self.model(recipe, "--only", "train")[-1]  # on both sides of the emulated run
        own = max(ours["tokens_per_s"], again["tokens_per_s"])
        self.rows.ratio("nvidia_nvfp4 over own BF16", f"{name}, whole step", emulated["tokens_per_s"], own, "tokens/s")
        self.rows.ratio("nvidia_nvfp4 over own BF16", f"{name}, forward+backward", emulated["tokens_per_s_fwd_bwd"],
                        max(ours["tokens_per_s_fwd_bwd"], again["tokens_per_s_fwd_bwd"]), "tokens/s")
        if recipe == "q6":
            self.train_rows(f"{name}, forced balance", self.model(recipe, "--only", "train", "--balance", "forced")[-1],
                            self.torch("--only", "train", "--balance", "forced", *geometry)[-1])

    def q6(self):
        self.train("q6")

    def m2(self):
        self.train("m2")

    def decode(self):
        theirs = {line["batch"]: line["tokens_per_s"] for line in self.torch("--only", "decode")}
        for kind, options in (("decode BF16", []), ("decode NVFP4", EQUAL)):
            for line in self.model("q6", "--only", "decode", *options):
                batch = line["batch"]
                self.rows.ratio(kind if batch == 64 else f"{kind}, others", f"Q6, batch {batch}, context {line['context']}",
                                line["tokens_per_s"], theirs[batch], "tokens/s")

    def equality(self):
        """The sampler with the promise and the fastest without it, in turns."""
        on, off = [], []
        for _ in range(2):
            on += self.model("q6", "--only", "decode", "--decode", "64", *EQUAL)
            for options in NOT_EQUAL:
                off += self.model("q6", "--only", "decode", "--decode", "64", *options)
        on, off = (max(line["tokens_per_s"] for line in side) for side in (on, off))
        self.rows.cost("equality of sampler and trainer", "Q6, rl_nvfp4, batch 64, context 1024", on, off, "tokens/s")


# In the order in which the parts start; on one card in this order.
PARTS = ["start", "q6", "m2", "decode", "equality", "losses", "gemm", "grouped", "attention", "quantise"]


def run_parts(bench, parts, cards):
    waiting, failures = queue.SimpleQueue(), []
    for part in parts:
        waiting.put(part)

    def work(card):
        bench.card.index = card
        while True:
            try:
                part = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                getattr(bench, part)()
            except Exception as failure:  # a part's failure must not cost the others' rows
                failures.append(f"{part}: {failure}")

    threads = [threading.Thread(target=work, args=(card,)) for card in cards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="the build folder")
    parser.add_argument("--out", default="bench.json")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--skip", default="")
    parser.add_argument("--limit", type=float, default=240, help="seconds a command")
    arguments = parser.parse_args()
    parts = [part for part in arguments.only.split(",") if part not in arguments.skip.split(",")]
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))} (parts: {', '.join(PARTS)})")
    listing = subprocess.run(["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"], capture_output=True,
                             text=True, check=True).stdout.splitlines()
    cards = [line.split(", ")[0] for line in listing]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        cards = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    bench = Bench(arguments.build, arguments.limit)
    begin = time.monotonic()
    failures = run_parts(bench, parts, cards)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip() or os.environ.get("FP4T_COMMIT", "unknown")
    head = {"card": listing[0].split(", ")[1], "cards": len(cards), "date": datetime.date.today().isoformat(),
            "commit": commit, "seconds": round(time.monotonic() - begin), "failed": failures}
    pathlib.Path(arguments.out).write_text(json.dumps({**head, "rows": bench.rows.rows, "log": bench.log}, indent=1))
    print(f"{head['card']}, {head['date']}, commit {commit}, {head['seconds']} s on {len(cards)} of them\n\n"
          f"{bench.rows.table()}")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
