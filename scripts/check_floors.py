#!/usr/bin/env python3
"""Checks that no file includes a folder above its floor or beside it (DESIGN.md section 2).

A file may include its own folder and lower floors. CUDA headers may appear only under kernels/cuda
and in engine/comm/nccl.cpp, MPI's in engine/comm/mpi.cpp. Exits with 1 and lists every violation otherwise.
"""
import pathlib
import re
import sys

FLOORS = {
    "kernels/base": 0, "kernels/formats": 1, "kernels/ops": 2,
    "kernels/cpu": 3, "kernels/cuda": 3, "kernels/no_cuda": 3,
    "engine/recipe": 4, "engine/comm": 4, "engine/metrics": 4,
    "engine/plan": 5, "engine/model": 6, "engine/tokens": 6,
    "engine/optim": 7, "engine/rl": 7, "engine/store": 7,
    "engine/stage": 8, "app": 9,
}
NEVER_INCLUDED = {"kernels/cpu", "kernels/cuda", "kernels/no_cuda"}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)
CUDA = re.compile(r"^(cuda|cublas|nccl|cooperative_groups|mma)")


def folder_of(path: str):
    """The floor folder that holds `path`, or None."""
    parts = path.split("/")
    for depth in (2, 1):
        name = "/".join(parts[:depth])
        if name in FLOORS and len(parts) > depth:
            return name
    return None


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    errors = []
    count = 0
    for top in ("kernels", "engine", "app"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in {".h", ".cpp", ".cu", ".cuh", ".inc"}:
                continue
            count += 1
            name = path.relative_to(root).as_posix()
            own = folder_of(name)
            if own is None:
                errors.append(f"{name}: lies in no floor")
                continue
            for quote, target in INCLUDE.findall(path.read_text(encoding="utf-8")):
                if CUDA.match(target) and own != "kernels/cuda" and name != "engine/comm/nccl.cpp":
                    errors.append(f"{name}: CUDA header {target}")
                if target == "mpi.h" and name != "engine/comm/mpi.cpp":
                    errors.append(f"{name}: MPI header")
                if quote != '"':
                    continue
                other = folder_of(target)
                if other is None:
                    errors.append(f"{name}: includes {target}, which is not a path from the root")
                elif other != own and FLOORS[other] >= FLOORS[own]:
                    errors.append(f"{name}: floor {FLOORS[own]} includes {target} of floor {FLOORS[other]}")
                elif other != own and other in NEVER_INCLUDED:
                    errors.append(f"{name}: includes {target}; bodies are linked, never included")
    for error in errors:
        print(error)
    print(f"check_floors: {count} files, {len(errors)} violations")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
