#!/usr/bin/env python3
"""Checks that prose and tree agree.

Every folder that holds sources, recipes, scripts or tests has a README.md; relative links lead to files; code in fenced
blocks and in backticks names sources, scripts, recipes, CMake presets and fp4train commands that exist; every option of
fp4train stands in a README. `name.cpp` must be a file of the repository, `name.*` at the head of a table's row files of
the page's folder. Lines of prose (not of tables, fenced blocks or records of results) have at most 120 characters.
Exits with 1 and lists every violation.
"""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WITH_README = ["app", "engine", "kernels", "configs", "configs/precision", "data", "scripts", "tests"]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
# Files of the repository as prose names them: from the root, in one of its top folders.
PATH = re.compile(
    r"(?<![\w/.<-])((?:app|configs|data|engine|kernels|scripts|tests|\.ci)/[\w./-]*\w\.(?:h|cpp|inc|yaml|md|py|sh|jsonl))\b")
FILE = re.compile(r"^\w+\.(?:h|cpp|inc|py|sh|yaml)$")
STEM = re.compile(r"^(\w+)\.(?:\*|\{h,cpp\})$")
ROW = re.compile(r"^\|([^|]*)\|", re.M)
WIDTH = 120
RECORDS = {"RESULTS.md", "LOG.md"}  # written row by row, each a measurement
WRITTEN_BY_RUNS = {"recipe.yaml"}
OPTION_PAGES = ["README.md", "engine/stage/README.md"]
SCRIPT = re.compile(r"(?:^|\s|\./)((?:scripts|\.ci)/[\w./-]+)")
COMMAND = re.compile(r"(?:^|[\s/])fp4train ([a-z][a-z-]+)\b")
PRESET = re.compile(r"--preset[ =]([\w-]+)")


def tracked(*patterns):
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *patterns],
                             cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(p for p in listing.split("\n") if p and (ROOT / p).exists())


def missing_readmes():
    folders = set(WITH_README)
    for path in tracked("engine", "kernels"):
        folders.add("/".join(path.split("/")[:2]))
    for folder in sorted(folders):
        if (ROOT / folder).is_dir() and not (ROOT / folder / "README.md").is_file():
            yield f"{folder}: no README.md"


def commands():
    names = set(re.findall(r'add\("([a-z-]+)"', (ROOT / "app/main.cpp").read_text(encoding="utf-8")))
    assert names, "app/main.cpp declares no commands"
    return names


def undocumented_options():
    """Options of the command line that neither the root README nor that of the commands' bodies names."""
    options = re.findall(r'add_(?:option|flag)\(\s*"(?:-\w,)?(--[a-z-]+)"', (ROOT / "app/main.cpp").read_text(encoding="utf-8"))
    assert options, "app/main.cpp declares no options"
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in OPTION_PAGES)
    for option in sorted(set(options)):
        if not re.search(rf"(?<![\w-]){option}(?![\w-])", pages):
            yield f"app/main.cpp: {option} stands in none of {', '.join(OPTION_PAGES)}"


def long_lines(page, text):
    if pathlib.PurePath(page).name in RECORDS:
        return
    prose = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(prose.split("\n"), 1):
        if len(line) > WIDTH and not line.startswith("|"):
            yield f"{page}:{number}: {len(line)} characters, at most {WIDTH}"


def check_page(page, known_commands, known_presets):
    text = (ROOT / page).read_text(encoding="utf-8")
    here = (ROOT / page).parent
    yield from long_lines(page, text)
    for target in LINK.findall(text):
        if "://" not in target and not (here / target).exists():
            yield f"{page}: link to {target}, which does not exist"
    blocks = FENCE.findall(text)
    spans = CODE.findall(FENCE.sub("", text))
    names = {pathlib.PurePath(p).name for p in tracked()}
    for code in spans:
        if FILE.match(code) and code not in names | WRITTEN_BY_RUNS:
            yield f"{page}: names {code}, which is no file of the repository"
    for head in ROW.findall(text):
        for code in CODE.findall(head):
            stem = STEM.match(code)
            if stem and not list(here.glob(stem[1] + ".*")):
                yield f"{page}: names {code}, and its folder holds none"
    for code in blocks + spans:
        for path in PATH.findall(code):
            if not (ROOT / path).exists():
                yield f"{page}: names {path}, which does not exist"
        for path in SCRIPT.findall(code):
            if not (ROOT / path).exists():
                yield f"{page}: runs {path}, which does not exist"
        for command in COMMAND.findall(code):
            if command not in known_commands:
                yield f"{page}: runs fp4train {command}, which is no command"
        for preset in PRESET.findall(code):
            if preset not in known_presets:
                yield f"{page}: CMake preset {preset} does not exist"


def main() -> int:
    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
    known_presets = {p["name"] for p in presets["configurePresets"]}
    pages = tracked("*.md")
    errors = [*missing_readmes(), *undocumented_options()]
    for page in pages:
        errors += sorted(set(check_page(page, commands(), known_presets)))
    for error in errors:
        print(error)
    print(f"check_docs: {len(pages)} pages, {len(errors)} violations")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
