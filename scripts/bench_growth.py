"""Measure time and peak memory of a training step against the size of the images, for each family of networks.

Under autocast to bf16, each point in a process of its own, as `memory.py` measures. An ImageGPT learns the colours of
all pixels of one image, the others classes of a batch. About two minutes on two cores.

    python scripts/bench_growth.py --json growth.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from memory import in_process, is_pixels


def main() -> None:
    """Measure, and write a list of points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["vit_tiny", "swin_tiny", "davit_tiny", "imagegpt_small"]
    parser.add_argument("--models", nargs="+", default=models, help="(%(default)s)")
    parser.add_argument("--sides", nargs="+", type=int, default=[96, 160, 224, 448], help="(%(default)s)")
    parser.add_argument("--pixel_sides", nargs="+", type=int, default=[16, 24, 32, 48], help="(%(default)s)")
    parser.add_argument("--batch_size", type=int, default=4, help="images, of an ImageGPT 1 (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="file for the points")
    args = parser.parse_args()
    points = []
    for name in args.models:
        for side in args.pixel_sides if is_pixels(name) else args.sides:
            points.append(measure(name, side, 1 if is_pixels(name) else args.batch_size, args.device))
            args.json.write_text(json.dumps(points, indent=1) + "\n")


def measure(name: str, image_size: int, batch_size: int, device: str) -> dict[str, Any]:
    """Give a point."""
    columns = {"precision": "bf16", "device": device, "image_size": image_size, "batch_size": batch_size}
    peak_mib, step_s = in_process(argparse.Namespace(steps=2, exact=False, **columns), name, "vitlab", "plain")
    return {"subject": name, **columns, "step_s": step_s, "peak_mib": peak_mib}


if __name__ == "__main__":
    main()
