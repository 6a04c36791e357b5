#!/usr/bin/env python3
"""Loss gaps of the precisions to BF16: one model and corpus, the same tokens and initial weights for every arm.

    scripts/bench/arms.py --binary build/fp4train [--text FOLDER ...] [--megabytes 120] [--minutes 3 | --steps N]
                          [--arms bf16 quartet2 nvidia_nvfp4 mxfp8 bf16@2] [--out runs/arms] [--limit SECONDS]

Writes OUT/corpus.jsonl from the *.py files under the folders (default: where this python3 keeps its packages), times BF16
for some steps to find how many it trains in --minutes, runs configs/bench/arms.yaml once an arm, one at a time on each GPU
(--cpu: on the CPU), and prints the table as Markdown; OUT/arms.json holds it with every evaluation. NAME@SEED is an
arm with other data order and initial weights: bf16@2 beside bf16 shows how far a seed alone moves the loss. A finished arm
is not run again. An arm stopped by --limit is compared with BF16 at the steps that both have. Set anything of the recipe
with --set, as fp4train takes it.
"""
import argparse
import datetime
import hashlib
import json
import os
import pathlib
import queue
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "configs/bench/arms.yaml"
BATCH = 32768  # tokens a step in the recipe
TAIL = 100  # steps over which the training loss is averaged
STOPPED = 75  # the exit code of a run that was asked to stop, and has saved


def write_corpus(folders, megabytes, path):
    """Documents in an order drawn from their names, each content once, until there are enough bytes."""
    if not path.exists():
        files = [f for folder in folders for f in pathlib.Path(folder).rglob("*.py")]
        files.sort(key=lambda f: hashlib.sha256(str(f).encode()).digest())
        seen, size = set(), 0
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as out:
            for file in files:
                try:
                    text = file.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                digest = hashlib.sha256(text.encode()).digest()
                if digest in seen or "\0" in text or not 256 <= len(text) <= 1 << 20:
                    continue
                seen.add(digest)
                out.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                if size >= megabytes * 1e6:
                    break
        partial.rename(path)
    documents = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
    size = sum(len(text.encode()) for text in documents)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()[:16]
    print(f"corpus: {len(documents)} files of Python source, {size / 1e6:.1f} MB, {digest}", flush=True)
    return {"documents": len(documents), "bytes": size, "sha256": digest}


class Arm:
    def __init__(self, text, out):
        self.text = text
        self.preset, _, seed = text.partition("@")
        self.seed = int(seed or 1)
        self.folder = out / text.replace("@", "-")

    def command(self, options, more):
        settings = [f"run.dir={self.folder}", f"run.name=arms-{self.text}", f"run.seed={self.seed}",
                    f"precision={{preset: {self.preset}}}",
                    f"stages[0].pretrain.data[0].paths={options.out / 'corpus.jsonl'}", *more, *options.set]
        if options.cpu:
            settings.append("run.device=cpu")
        return [options.binary, "--config", RECIPE, *(word for s in settings for word in ("--set", s))]

    def lines(self):
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def figures(self):
        """Losses by step, held-out losses by step, and tokens trained."""
        lines = self.lines()
        steps = {line["step"]: line for line in lines if line["kind"] == "step"}
        held_out = {line["step"]: line["text_loss"] for line in lines if line["kind"] == "eval"}
        tokens = sum(line["trained_tokens"] for line in steps.values())
        return {step: line["loss"] for step, line in steps.items()}, held_out, tokens

    def speed(self):
        """Median of the console's tokens a second, without the first steps."""
        console = (self.folder / "console.txt").read_text(encoding="utf-8", errors="replace")
        rates = [float(rate) for rate in re.findall(r"step=\d+/\d+ .*tok/s=(\d+)", console)]
        return statistics.median(rates[min(10, len(rates) // 2):]) if rates else float("nan")

    def run(self, options, more, device=None, deadline=None):
        """Runs to the end, or to the deadline (the run is asked to stop there and leaves its figures)."""
        if (self.folder / "summary.json").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        with (self.folder / "console.txt").open("w", encoding="utf-8") as console:
            process = subprocess.Popen(list(map(str, self.command(options, more))), stdout=console,
                                       stderr=subprocess.STDOUT, env=environment)
            try:
                code = process.wait(max(1, deadline - time.monotonic()) if deadline else None)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                code = process.wait()
                code = 0 if code == STOPPED else code
        if code != 0:
            print((self.folder / "console.txt").read_text(encoding="utf-8", errors="replace")[-2000:], file=sys.stderr)
            raise SystemExit(f"arm {self.text} ended with {code}")


def steps_in(options, device):
    """As many steps as BF16 trains in --minutes, in hundreds."""
    probe = Arm("bf16", options.out / "probe")
    probe.run(options, [f"stages[0].pretrain.steps={options.probe_steps}", "stages[0].pretrain.eval.tokens=32768",
                        f"stages[0].pretrain.schedule.warmup={options.probe_steps // 2}"], device)
    rate = probe.speed()
    steps = max(100, round(rate * options.minutes * 60 / BATCH / 100) * 100)
    print(f"BF16 trains {rate:.0f} tokens a second: {steps} steps in {options.minutes:g} minutes", flush=True)
    return steps


def run_arms(arms, options, more, devices):
    waiting, failures = queue.SimpleQueue(), []
    for arm in sorted(arms, key=lambda a: a.text != "bf16"):  # without BF16 the others compare with nothing
        waiting.put(arm)
    deadline = time.monotonic() + options.limit if options.limit else None

    def work(device):
        while True:
            try:
                arm = waiting.get_nowait()
            except queue.Empty:
                return
            if deadline and time.monotonic() > deadline:
                continue
            try:
                arm.run(options, more, device, deadline)
            except SystemExit as failure:
                failures.append(str(failure))

    threads = [threading.Thread(target=work, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def compare(arms):
    """One row an arm: its losses, and how far they lie above BF16's of the same steps (seed 1)."""
    reference_losses, reference_held_out, _ = next(a for a in arms if a.text == "bf16").figures()
    rows = []
    for arm in arms:
        losses, held_out, tokens = arm.figures()
        common = sorted(set(losses) & set(reference_losses))
        evaluations = sorted(set(held_out) & set(reference_held_out))
        if not common or not evaluations:
            rows.append({"arm": arm.text, "steps": 0})
            continue
        tail, last = common[-TAIL:], evaluations[-1]
        mean, reference = (statistics.fmean(x[s] for s in tail) for x in (losses, reference_losses))
        rows.append({"arm": arm.text, "steps": max(losses), "trained_tokens": tokens, "tokens_per_s": arm.speed(),
                     "initial_held_out": held_out.get(0), "tail_steps": [tail[0], tail[-1]],
                     "training_loss": mean, "training_gap": mean - reference,
                     "training_gap_percent": 100 * (mean / reference - 1),
                     "held_out_step": last, "held_out_loss": held_out[last],
                     "held_out_gap": held_out[last] - reference_held_out[last],
                     "held_out_gap_percent": 100 * (held_out[last] / reference_held_out[last] - 1),
                     "held_out": held_out})
    return rows


def markdown(rows):
    lines = ["| arm | steps | tokens | tok/s | training loss, last steps | gap to BF16 | held-out loss | gap to BF16 |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        if not r["steps"]:
            lines.append(f"| {r['arm']} | 0 | | | | | | |")
            continue
        lines.append(f"| {r['arm']} | {r['steps']} | {r['trained_tokens'] / 1e6:.1f}M | {r['tokens_per_s']:.0f} "
                     f"| {r['training_loss']:.4f} ({r['tail_steps'][0]} to {r['tail_steps'][1]}) "
                     f"| {r['training_gap']:+.4f} ({r['training_gap_percent']:+.2f}%) "
                     f"| {r['held_out_loss']:.4f} (step {r['held_out_step']}) "
                     f"| {r['held_out_gap']:+.4f} ({r['held_out_gap_percent']:+.2f}%) |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="build/fp4train")
    parser.add_argument("--text", nargs="+", default=[sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]])
    parser.add_argument("--megabytes", type=float, default=120)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--probe-steps", type=int, default=60)
    parser.add_argument("--arms", nargs="+", default=["bf16", "quartet2", "nvidia_nvfp4", "mxfp8", "bf16@2"])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/arms"))
    parser.add_argument("--limit", type=float, help="seconds for all arms together")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    if "bf16" not in options.arms:
        parser.error("--arms needs bf16: the gaps are to it")
    options.out.mkdir(parents=True, exist_ok=True)
    card, devices = "CPU", [None]
    if not options.cpu:
        listing = subprocess.run(["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"], capture_output=True,
                                 text=True, check=True).stdout.splitlines()
        devices = [line.split(", ")[0] for line in listing]
        if os.environ.get("CUDA_VISIBLE_DEVICES"):
            devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        card = f"{len(devices)} x {listing[0].split(', ')[1]}"
    corpus = write_corpus(options.text, options.megabytes, options.out / "corpus.jsonl")
    steps = options.steps or steps_in(options, devices[0])
    arms = [Arm(text, options.out) for text in options.arms]
    failures = run_arms(arms, options, [f"stages[0].pretrain.steps={steps}"], devices)
    rows = compare(arms)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip() or os.environ.get("FP4T_COMMIT", "unknown")
    date = datetime.date.today().isoformat()
    (options.out / "arms.json").write_text(json.dumps(
        {"card": card, "date": date, "commit": commit, "command": sys.argv, "corpus": corpus, "rows": rows}, indent=1))
    print(f"{card}, {date}, commit {commit}; losses in nats a byte\n\n{markdown(rows)}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
