"""Measure everything beside timm, torchvision and transformers, and write docs/performance.json, .md and .png.

    python scripts/benchmark.py --photos trashnet --cifar cifar10
    python scripts/benchmark.py --photos trashnet --parts loading_photos     # one part anew, the others' rows stay
    python scripts/benchmark.py --device cuda --parts networks_bf16 networks_compiled pixels sampling

PHOTOS holds train and val with class folders of photographs, CIFAR train and test of 32x32 pixels; what needs a folder
that is not given is left out. Each part is a script beside this one, in a process of its own, one after the other, with
a time limit; its docstring says what is compared and how. What is done is kept in `--work`, so that the same command
goes on after a stop; once all is written, it is removed. The README's table stands between `<!-- performance -->` and
`<!-- /performance -->`; the notes of docs/performance_notes.md are put into the page.

Minutes on two cores that do nothing else: 28 of an Intel Xeon with AMX (networks_bf16 4, memory 5, each other part 1 to
3), 35 of an AMD EPYC.
`--quick` takes tiny sizes, to see that all runs: its figures mean nothing, and it writes into runs/ alone.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from measuring import matrix_rate
from performance_page import write_pages

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGES = ("torch", "torchvision", "timm", "transformers")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One script with its options."""

    name: str
    command: str
    """Script and options; PHOTOS and CIFAR stand for the folders."""
    tiny: str = ""
    """Options of `--quick`, which win over those before."""
    timeout_s: int

    def needs(self) -> list[str]:
        """Name the folders that it reads."""
        words = [word.partition("/")[0] for word in self.command.split()]
        return [name for name in ("PHOTOS", "CIFAR") if name in words]


_COMPILED = "--works train_step --modes compiled --precisions bf16 --rounds 3"
_TINY = "--models vit_try --batch 4 --rounds 1"
_SHORT = "--photo_batches 1 --cifar_batches 1 --predicted 8 --rounds 1 --uncounted 0"
_CIFAR = "--subject cifar --image_size 32 --images 4000"
_ONE_PEAK = "--models vit_try --batch_size 4 --rounds 1"
_SQUARE = "--models imagegpt_small --image_size 64 --batch_size 1 --precision bf16 --steps 1"
FULL = [
    Part(name="networks_bf16", command="bench_networks.py --precisions bf16 --rounds 5", tiny=_TINY, timeout_s=900),
    Part(
        name="networks_fp32",
        command="bench_networks.py --precisions fp32 --batch 8 --rounds 4",
        tiny=_TINY,
        timeout_s=1200,
    ),
    Part(
        name="networks_compiled",
        command=f"bench_networks.py --models vit_small {_COMPILED} --settings fused unfused",
        tiny=_TINY,
        timeout_s=600,
    ),
    Part(
        name="swin_compiled",
        command=f"bench_networks.py --models swin_tiny {_COMPILED} --settings fused",
        tiny=_TINY,
        timeout_s=600,
    ),
    Part(name="pixels", command="bench_pixels.py --rounds 3", tiny="--image_size 8 --rounds 1", timeout_s=400),
    Part(
        name="sampling",
        command="bench_sampling.py --given 480",
        tiny="--given 8 --steps 3 --rounds 1",
        timeout_s=400,
    ),
    Part(
        name="loading_photos",
        command="bench_loading.py --data PHOTOS/train --rounds 3",
        tiny="--images 16 --rounds 1",
        timeout_s=300,
    ),
    Part(
        name="loading_cifar",
        command=f"bench_loading.py --data CIFAR/train {_CIFAR} --rounds 3",
        tiny="--images 64 --rounds 1",
        timeout_s=300,
    ),
    Part(
        name="epoch_photos",
        command="bench_jobs.py --works epoch predict_folder --photos PHOTOS",
        tiny=_SHORT,
        timeout_s=600,
    ),
    Part(name="epoch_cifar", command="bench_jobs.py --works epoch --cifar CIFAR", tiny=_SHORT, timeout_s=600),
    Part(
        name="cold_start",
        command="bench_jobs.py --works cold_start --photos PHOTOS",
        tiny=f"{_SHORT} --compiled vit_try",
        timeout_s=600,
    ),
    Part(name="memory", command="memory.py --batch_size 8", tiny=_ONE_PEAK, timeout_s=900),
    Part(name="memory_exact", command="memory.py --batch_size 8 --exact --rounds 1", tiny=_ONE_PEAK, timeout_s=600),
    Part(name="memory_pixels", command=f"memory.py {_SQUARE} --rounds 1", tiny="--image_size 8", timeout_s=900),
    Part(
        name="growth",
        command="bench_growth.py",
        tiny="--models vit_tiny imagegpt_small --sides 32 64 --pixel_sides 8 12",
        timeout_s=600,
    ),
]
QUICK = [replace(part, command=f"{part.command} {part.tiny}") for part in FULL]
_GPU_MODELS = "--models vit_base swin_tiny davit_tiny --precisions bf16 --batch 64 --device cuda"
GPU = [
    Part(name="pixels", command="bench_pixels.py --precisions bf16 --batch 8 --device cuda", timeout_s=60),
    Part(name="sampling", command="bench_sampling.py --given 480 --precisions fp32 bf16 --device cuda", timeout_s=60),
    Part(name="networks_bf16", command=f"bench_networks.py {_GPU_MODELS}", timeout_s=120),
    Part(
        name="networks_compiled",
        command=f"bench_networks.py {_GPU_MODELS} --works train_step --modes compiled --settings fused --rounds 3",
        timeout_s=300,
    ),
]


class PartFailedError(Exception):
    """A part did not end well; `result` is what it had done, if anything."""

    def __init__(self, reason: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.result = result


def main() -> int:
    """Run the parts that are asked for, then write the pages; 1 where a part failed."""
    args = parse()
    known = GPU if args.device == "cuda" else QUICK if args.quick else FULL
    parts = [part for part in known if args.parts is None or part.name in args.parts]
    args.work.mkdir(parents=True, exist_ok=True)
    args.docs.mkdir(parents=True, exist_ok=True)
    folders = {"PHOTOS": args.photos, "CIFAR": args.cifar}
    results, failed = run_all(parts, folders, args.work, limit_s=60 * args.minutes)
    path = args.docs / "performance.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    record = merge(earlier, results, args.device)
    path.write_text(json.dumps(record, indent=1) + "\n")
    write_pages(record, args.docs, args.readme)
    print(f"{path}, performance.md, performance.png" + (f" and the table of {args.readme}" if args.readme else ""))
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again")
        return 1
    for part in parts:
        part_file(part, args.work).unlink(missing_ok=True)
    return 0


def run_all(
    parts: Sequence[Part], folders: Mapping[str, Path | None], work: Path, *, limit_s: float
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run parts one after the other until time is up; give what they found, and the names of those that failed."""
    end = time.monotonic() + limit_s
    results: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for place, part in enumerate(parts, 1):
        say = f"{place}/{len(parts)} {part.name}"
        if missing := [f"--{name.lower()}" for name in part.needs() if folders[name] is None]:
            print(f"{say}: left out, needs {' and '.join(missing)}", flush=True)
            continue
        if earlier := kept(part, work):
            print(f"{say}: done before", flush=True)
            results[part.name] = earlier
            continue
        left_s = end - time.monotonic()
        if left_s <= 0:
            print(f"{say}: left out, time is up", flush=True)
            failed.append(part.name)
            continue
        print(f"{say}: scripts/{part.command}", flush=True)
        try:
            results[part.name] = run(part, folders, work, timeout_s=min(part.timeout_s, left_s))
            print(f"{say}: {results[part.name]['duration_s']:.0f} s", flush=True)
        except PartFailedError as error:
            print(f"{say}: failed: {error}", flush=True)
            failed.append(part.name)
            if error.result:
                results[part.name] = error.result
    return results, failed


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR images")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in FULL], help="(all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda has four parts (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing after that (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, into runs/quick")
    parser.add_argument("--docs", type=Path, help="folder for the pages (docs)")
    parser.add_argument("--readme", type=Path, help="file with the markers (README.md; with --docs or --quick none)")
    parser.add_argument("--work", type=Path, help="folder for what is done (runs/benchmark)")
    args = parser.parse_args()
    if args.docs is None and not args.quick:
        args.readme = args.readme or ROOT / "README.md"
    args.docs = args.docs or ROOT / ("runs/quick" if args.quick else "docs")
    args.work = args.work or ROOT / "runs" / f"benchmark-{'quick' if args.quick else args.device}"
    return args


def part_file(part: Part, work: Path) -> Path:
    """Name the file of a part that is done."""
    return work / f"{part.name}.json"


def kept(part: Part, work: Path) -> dict[str, Any] | None:
    """Read what an earlier call has done of a part with the same options."""
    path = part_file(part, work)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result if result["command"] == part.command else None


def run(part: Part, folders: Mapping[str, Path | None], work: Path, *, timeout_s: float) -> dict[str, Any]:
    """Run a part and keep what it found.

    Raises:
        PartFailedError: it ended with an error, or not in time.
    """
    script, *options = part.command.split()
    found = work / f"{part.name}.found"
    found.unlink(missing_ok=True)
    words = [replace_folder(word, folders) for word in options]
    began = time.perf_counter()

    def result() -> dict[str, Any]:
        date, duration_s = datetime.now(UTC).strftime("%Y-%m-%d"), round(time.perf_counter() - began, 1)
        rows = json.loads(found.read_text())
        return {"command": part.command, "date": date, "duration_s": duration_s, "found": rows}

    command = [sys.executable, str(HERE / script), *words, "--json", str(found)]
    # A session of its own, so that what it has started ends with it.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            done = result() if found.exists() else None
            raise PartFailedError(f"not done after {timeout_s:.0f} s", done) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        (work / f"{part.name}.log").write_text(errors)
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise PartFailedError(f"{lines[-1]} (see {work / f'{part.name}.log'})")
    done = result()
    part_file(part, work).write_text(json.dumps(done, indent=1) + "\n")
    found.unlink()
    return done


def replace_folder(word: str, folders: Mapping[str, Path | None]) -> str:
    """Put a folder's path in the place of its name."""
    name, slash, rest = word.partition("/")
    return f"{folders[name]}{slash}{rest}" if name in folders else word


def merge(earlier: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], device: str) -> dict[str, Any]:
    """Put what was found in the place of what the same parts had found on the same device."""
    fresh = [{**row, "part": name} for name, result in results.items() if name != "growth" for row in result["found"]]
    old = [row for row in earlier.get("rows", []) if row["device"] != device or row["part"] not in results]
    settings = {
        f"{name}, {device}": {key: value for key, value in result.items() if key != "found"}
        for name, result in results.items()
    }
    growth = results["growth"]["found"] if "growth" in results else earlier.get("growth", [])
    rates = {name: matrix_rate(torch.device(device), getattr(torch, name)) for name in ("float32", "bfloat16")}
    return {
        "machine": {**earlier.get("machine", {}), device: describe(device)},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "settings": {**earlier.get("settings", {}), **settings},
        "matrix_rate": {**earlier.get("matrix_rate", {}), device: rates},
        "rows": in_order([*old, *fresh]),
        "growth": growth,
    }


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort by device and part, so that a part measured anew keeps its place."""
    places = {part.name: place for place, part in enumerate(FULL)}
    return sorted(rows, key=lambda row: (row["device"], places[row["part"]]))


def describe(device: str) -> str:
    """Say what the machine is."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    instructions = torch.backends.cpu.get_cpu_capability()
    if torch.cpu.get_capabilities().get("amx_bf16"):
        instructions += " and AMX"
    return f"{names[0] if names else platform.processor()}, {cores} cores, {instructions}"


if __name__ == "__main__":
    sys.exit(main())
