"""Write some of the built-in digits' test images as PNG files, to have a folder to predict."""

import argparse
from pathlib import Path

from PIL import Image

from vitlab.data.datasets import load_dataset


def main() -> None:
    """Write DIR/0007-is-3.png and so on: the image's number and its true class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--count", type=int, default=12, help="number of images")
    arguments = parser.parse_args()
    dataset = load_dataset("digits", val_fraction=0.1, seed=0)
    test = dataset.splits["test"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for index in range(min(arguments.count, len(test))):
        name = f"{index:04d}-is-{dataset.classes[test.labels[index]]}.png"
        Image.fromarray(test.read(index)).save(arguments.out / name)
    print(f"{min(arguments.count, len(test))} images: {arguments.out}")


if __name__ == "__main__":
    main()
