"""Pictures to test with, written here or unpacked from the data beside the checkout, and loaders."""

import tarfile

import numpy as np
import pytest
from PIL import Image

from vitlab.data.loader import Loader
from vitlab.data.preprocess import EvalTransform, Preprocess
from vitlab.data.splits import ArraySplit


@pytest.fixture(scope="session")
def photographs(shared_data):
    """A dozen photographs, uint8 (384, 512, 3), and two of them on their side."""
    with tarfile.open(shared_data("trashnet.tar")) as archive:
        members = [member for member in archive.getmembers() if member.name.endswith(".jpg")][::65]
        images = [np.array(Image.open(archive.extractfile(member))) for member in members]
    return images + [np.ascontiguousarray(image.transpose(1, 0, 2)) for image in images[:2]]


@pytest.fixture(scope="session")
def cifar_jpegs(shared_data, tmp_path_factory):
    """A folder CLASS/NNNN.jpg of real 32-pixel JPEGs: 70 of each of three classes."""
    root = tmp_path_factory.mktemp("cifar-jpegs")
    with tarfile.open(shared_data("cifar10-jpeg.tar.xz"), "r|xz") as archive:  # a stream: the rest stays packed
        for member in archive:
            if not member.isfile():
                continue
            _, _, name, file = member.name.split("/")
            if name == "cat":
                break
            if int(file[:4]) < 70:
                (root / name).mkdir(exist_ok=True)
                (root / name / file).write_bytes(archive.extractfile(member).read())
    return root


@pytest.fixture
def write_image():
    """Give a function that writes a picture of one colour, its suffix telling the format, and returns its path."""

    def write(path, color=(200, 100, 50), size=(12, 10)):
        path.parent.mkdir(parents=True, exist_ok=True)
        formats = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".avif": "AVIF"}
        Image.new("RGB", size, color).save(path, formats[path.suffix.lower()])
        return path

    return write


@pytest.fixture
def write_classes(write_image):
    """Give a function that writes `count` distinct PNGs into each class folder of a root."""

    def write(root, classes, count=4):
        for label, name in enumerate(classes):
            for number in range(count):
                write_image(root / str(name) / f"{number:02}.png", (label * 20 % 256, number, 7), (9, 6))
        return root

    return write


@pytest.fixture
def array_split():
    """Give a function that makes a split of so many random images, (20, 14) unless asked otherwise, of five labels."""

    def make(count=23, height=20, width=14):
        images = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        labels, paths = np.arange(count) % 5, [f"p{i}" for i in range(count)]
        return ArraySplit(name="train", labels=labels, paths=paths, images=images)

    return make


@pytest.fixture
def make_loader(array_split):
    """Give a function that builds a loader, by default of `array_split` in batches of five; all are closed at last."""
    loaders = []

    def make(split=None, transform=None, **options):
        transform = transform or EvalTransform(Preprocess(image_size=(16, 12)))
        loaders.append(Loader(split or array_split(), transform, **({"batch_size": 5} | options)))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
