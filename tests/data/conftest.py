"""Pictures to test with: written here, or unpacked from the data beside the checkout where that is present."""

import tarfile

import numpy as np
import pytest
from PIL import Image


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
