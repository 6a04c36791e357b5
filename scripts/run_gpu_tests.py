#!/usr/bin/env python3
"""Runs the tests with the label gpu, each in a process of its own, side by side on every GPU of this machine.

    scripts/run_gpu_tests.py --build build-gpu [--check memcheck|racecheck|initcheck|synccheck] [--only REGEX]
                             [--jobs N] [--limit SECONDS]

With --check every op's test runs under that tool of compute-sanitizer. Left out there, and said so in the output: runs of
the whole trainer (they call the same ops), and tests of more than 2^31 elements (the tools take minutes for each; the
same kernels are checked at other sizes). Each test's output goes to BUILD/gpu_logs. Exits with 1 where a test fails,
runs past its limit, or an op of op_list.inc stands in no test.
"""
import argparse
import contextlib
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Tests whose tensors fill a good part of a card: one at a time on each, and not under the sanitizers.
HUGE = re.compile(r"Large\.|huge_tensor|beyond_(two_to_the_31|2_to_the_31|2_31)")
CLEAN = {"memcheck": r"ERROR SUMMARY: 0 errors", "initcheck": r"ERROR SUMMARY: 0 errors",
         "synccheck": r"ERROR SUMMARY: 0 errors", "racecheck": r"RACECHECK SUMMARY: .*\(0 errors"}

# Tests that racecheck makes too slow, and the share of their checks that the GPU takes there (tests/support/mirror.h).
THINNED = [(r"GpuQuantize\.(every|non_finite|ragged|equal_groups|old_scales)|GpuDequantize\.any_codes", 16),
           (r"GpuQuantize\.(unaligned|both|draws|a_weight)", 6), (r"GpuAttention\.forward_and_gradient", 4),
           (r"GpuAttentionCached\.cached_rows", 8), (r"GpuAttentionCached\.appending", 4),
           (r"GpuEmbed\.embeddings_and|Gpu(Norm|QkNormRope)\.forward_and_backward", 3),
           (r"GpuGemmCodes\.codes_on_both|GpuAdamWStep\.equals", 8), (r"GpuGemm\.fp32|GpuLoss\.(forward|backward)_f", 6),
           (r"GpuDispatch\.", 8),
           (r"GpuMoe\.gradients|GpuRouting\.(routes_are|statistics)|GpuSample\.(tokens_are_the_cpus$|log_probs)", 4)]


# The collectives' tests run on as many ranks; others of several ranks start the program themselves.
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
COMM_RANKS = 2


class Test:
    def __init__(self, executable, name):
        self.executable, self.name = executable, name
        self.ranks = executable.name.startswith("test_gpu_ranks_")
        self.huge = HUGE.search(name) is not None
        self.status, self.seconds, self.note = "not run", 0.0, ""
        self.tail = []  # of the output, where it failed

    def __str__(self):
        return f"{self.executable.name} {self.name}"


def tests_of(executable):
    listing = subprocess.run([executable, "--gtest_list_tests"], capture_output=True, text=True, check=False)
    if listing.returncode == 77:
        sys.exit("no GPU on this machine")
    suite = ""
    for line in listing.stdout.splitlines():
        line = line.split("#")[0].rstrip()
        if line.endswith(".") and not line.startswith(" "):
            suite = line
        elif line.startswith("  "):
            yield Test(executable, suite + line.strip())


def gpus():
    listing = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True,
                             check=True).stdout.split()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else listing


def kill(process):
    """Of a tool and the test that it started; nothing where it has just ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def untested_ops():
    ops = re.findall(r"^FP4T_OP\((\w+)", (ROOT / "kernels/ops/op_list.inc").read_text(encoding="utf-8"), re.M)
    assert ops, "op_list.inc lists no op"
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests/gpu").glob("*.cpp")))
    return len(ops), [op for op in ops if not re.search(rf"\b{op}\b", text)]


class Runner:
    def __init__(self, arguments):
        self.check, self.limit = arguments.check, arguments.limit
        self.build, self.devices = pathlib.Path(arguments.build).resolve(), gpus()
        self.logs = pathlib.Path(arguments.build) / "gpu_logs"
        self.logs.mkdir(exist_ok=True)
        self.printing = threading.Lock()
        self.done = 0
        self.stopping, self.running = False, set()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, *_):
        """Ends what runs; the tests that did not get to their end count as not run."""
        self.stopping = True
        for process in list(self.running):
            kill(process)

    def run_all(self, tests, devices, jobs):
        """Huge tests one at a time on each GPU, beside them `jobs` others with the GPUs in turn."""
        pools = []
        for mine, places in ((True, devices), (False, [devices[k % len(devices)] for k in range(jobs)])):
            waiting = queue.SimpleQueue()
            for test in (t for t in tests if t.huge == mine):
                waiting.put(test)
            pools += [threading.Thread(target=self.work, args=(waiting, place, len(tests))) for place in places]
        for thread in pools:
            thread.start()
        for thread in pools:
            while thread.is_alive():
                thread.join(1)  # so that signals get through

    def work(self, waiting, device, total):
        while True:
            try:
                test = waiting.get_nowait()
            except queue.Empty:
                return
            if self.stopping:
                continue
            self.run_on(test, device)
            with self.printing:
                self.done += 1
                print(f"{self.done:4}/{total} {test.status:8} {test.seconds:6.1f} s  {test}"
                      + (f"  ({test.note})" if test.note else ""), flush=True)

    def run_on(self, test, device):
        log = self.logs / (re.sub(r"\W+", "_", f"{test.executable.name}.{test.name}.{self.check or 'run'}") + ".log")
        command = [str(test.executable), f"--gtest_filter={test.name}", "--gtest_color=no"]  # mpirun looks like a screen
        if self.check:
            command = ["compute-sanitizer", "--tool", self.check, "--error-exitcode", "9", *command]
        share = next((n for pattern, n in THINNED if re.search(pattern, test.name)), 1)
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=device, FP4T_TEST_SOURCE=str(ROOT))
        if test.ranks:
            environment.update(CUDA_VISIBLE_DEVICES=",".join(self.devices), FP4T_TEST_BINARY=str(self.build / "fp4train"),
                               FP4T_TEST_MPIRUN=shutil.which("mpirun") or "mpirun")
            if test.executable.name == "test_gpu_ranks_comm":
                command = [*MPIRUN, "-np", str(COMM_RANKS), *command]
        if self.check == "racecheck" and share > 1:
            environment["FP4T_GPU_SHARE"] = str(share)
            test.note = f"one of {share} checks"
        begin = time.monotonic()
        with log.open("w", encoding="utf-8") as out:
            with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment,
                                  start_new_session=True) as process:
                self.running.add(process)
                if self.stopping:
                    self.stop()
                try:
                    code = process.wait(self.limit)
                except subprocess.TimeoutExpired:
                    kill(process)
                    code = None
                self.running.discard(process)
        if self.stopping:
            return
        test.seconds = time.monotonic() - begin
        text = log.read_text(encoding="utf-8", errors="replace")
        test.tail = text.splitlines()[-20:]
        if code is None:
            test.status, test.note = "too long", f"stopped after {self.limit:.0f} s"
        elif code != 0:
            test.status, test.note = "failed", f"exit {code}, see {log}"
        elif "[  PASSED  ] 1 test" not in text or (self.check and not re.search(CLEAN[self.check], text)):
            skipped = "[  SKIPPED ]" in text
            test.status, test.note = ("skipped", test.note) if skipped else ("failed", f"no clean end, see {log}")
        else:
            test.status = "passed"
            warnings = re.search(r"(\d+) warnings?\)", text) if self.check == "racecheck" else None
            if warnings and warnings[1] != "0":
                test.note = f"{warnings[1]} warnings, see {log}"


def report(tests, left_out, check, seconds):
    for test in (t for t in tests if t.status in ("failed", "too long")):
        print(f"{test.status}: {test} ({test.note})")
        print("".join(f"    {line}\n" for line in test.tail), end="")
    slowest = sorted(tests, key=lambda t: -t.seconds)[:5]
    print("slowest: " + ", ".join(f"{t.name} {t.seconds:.0f} s" for t in slowest))
    if left_out:
        print(f"left out under {check}: {len(left_out)} tests of the whole trainer or of more than 2^31 elements: "
              + ", ".join(t.name for t in left_out))
    count, missing = untested_ops()
    print(f"ops with a test: {count - len(missing)} of {count}" + (f", without: {', '.join(missing)}" if missing else ""))
    counts = {s: sum(t.status == s for t in tests) for s in ("passed", "failed", "too long", "skipped", "not run")}
    print(f"== {check or 'gpu tests'}: {counts['passed']} of {len(tests)} "
          + ("clean" if check else "passed")
          + "".join(f", {n} {s}" for s, n in counts.items() if n and s != "passed")
          + (f", {len(left_out)} left out" if left_out else "") + f", {seconds:.0f} s")
    return counts["passed"] + counts["skipped"] == len(tests) and not missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--check", choices=sorted(CLEAN))
    parser.add_argument("--only", default="", help="tests whose executable and name match")
    parser.add_argument("--jobs", type=int, help="tests at a time; the default is half the cores, at most 8 a GPU")
    parser.add_argument("--limit", type=float, default=300, help="seconds a test")
    arguments = parser.parse_args()
    devices = gpus()
    arguments.jobs = arguments.jobs or max(1, min(len(os.sched_getaffinity(0)) // 2, 8 * len(devices)))
    executables = sorted(p for p in (pathlib.Path(arguments.build) / "tests").glob("test_gpu_*") if p.is_file())
    if not executables:
        sys.exit(f"{arguments.build}: no GPU tests built")
    tests = [t for e in executables for t in tests_of(e) if re.search(arguments.only, str(t))]
    left_out = [t for t in tests if arguments.check and (t.huge or t.ranks or t.executable.name.startswith("test_gpu_engine_"))]
    tests = [t for t in tests if t not in left_out]
    tests.sort(key=lambda t: "engine" not in t.executable.name)  # the longest first
    if not tests:
        sys.exit("no test matches")
    print(f"{len(tests)} tests, {arguments.jobs} at a time on {len(devices)} GPU{'s'[:len(devices) > 1]}, "
          f"at most {arguments.limit:.0f} s each", flush=True)
    begin = time.monotonic()
    Runner(arguments).run_all(tests, devices, arguments.jobs)
    return 0 if report(tests, left_out, arguments.check, time.monotonic() - begin) else 1


if __name__ == "__main__":
    sys.exit(main())
