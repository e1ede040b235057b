"""Time the first training step of a compiled network, which compiles it.

    TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python scripts/first_step.py vitlab vit_small

`vitlab` compiles the repeated blocks of our network, as `train.compile` does; `timm` the whole of timm's. The step is
under autocast to bf16, and its seconds are printed; the compiler itself is imported before.
"""

import argparse
import time

from bench_networks import TIMM, Bench, Job


def main() -> None:
    """Build, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=["vitlab", "timm, fused", "timm, unfused"])
    parser.add_argument("model", choices=sorted(TIMM))
    parser.add_argument("--batch", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    args = parser.parse_args()
    job = Job(
        model=args.model, work="train_step", precision="bf16", mode="compiled", batch=args.batch, device=args.device
    )
    step = Bench(job).timing(args.subject)
    began = time.perf_counter()
    step()
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
