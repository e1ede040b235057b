"""A run's TensorBoard events: one file without subfolders, which a resumed run cuts back and goes on with."""

import io
import json
import math
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image

from vitlab.disk import replacing
from vitlab.text import printable

EVENTS_NAME = "events.out.tfevents.vitlab"


class EventLog:
    """Writes events; each is on disk after `flush`.

    torch's SummaryWriter starts a new file at each resume, and files of one second sort by process id, so that steps
    appear twice or out of order. Here the file is cut to the steps that the state knows, and appended to.

    Args:
        folder: made if missing.
        keep_steps: steps that the run has behind it; later events in the file are from an abandoned future.
    """

    def __init__(self, folder: Path, *, keep_steps: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / EVENTS_NAME
        self.is_new = not (keep_steps and path.exists())
        if self.is_new:
            path.unlink(missing_ok=True)
        else:
            _cut(path, keep_steps)
        self._file = path.open("ab")
        self._records = RecordWriter(self._file)
        if self.is_new:
            self._write(file_version="brain.Event:2")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write a point of each curve; `step` counts optimizer steps."""
        from torch.utils.tensorboard.summary import scalar

        for tag, value in values.items():
            self._write(step=step, summary=scalar(tag, value))

    def image(self, step: int, tag: str, image: NDArray[np.uint8], *, is_photo: bool = False) -> None:
        """Write a picture (H, W, 3) uint8, whole as PNG or, a tenth as large, as JPEG."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        H, W, _ = image.shape
        data = io.BytesIO()
        Image.fromarray(image).save(data, format="JPEG" if is_photo else "PNG", quality=90)
        picture = Summary.Image(height=H, width=W, colorspace=3, encoded_image_string=data.getvalue())
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, image=picture)]))

    def histogram(self, step: int, tag: str, values: NDArray[np.float32]) -> None:
        """Write how finite values of any shape are spread, in 64 bins from the least to the greatest."""
        from torch.utils.tensorboard.summary import histogram

        self._write(step=step, summary=histogram(tag, values, 64))

    def precision_recall(self, step: int, tag: str, truth: NDArray[np.bool_], shares: NDArray[np.float64]) -> None:
        """Write precision and recall at each threshold on probabilities (N,), of what is true or not (N,)."""
        from torch.utils.tensorboard.summary import pr_curve

        self._write(step=step, summary=pr_curve(tag, truth, shares, 127))

    def layout(self, groups: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Write the groups of the CUSTOM SCALARS tab: of each its charts by title, of each the tags in it."""
        from torch.utils.tensorboard.summary import custom_scalars

        charts = {
            group: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in named.items()}
            for group, named in groups.items()
        }
        self._write(step=0, summary=custom_scalars(charts))

    def text(self, tag: str, text: str) -> None:
        """Write text (Markdown) at step 0."""
        from torch.utils.tensorboard.summary import text as text_summary

        self._write(step=0, summary=text_summary(tag, text))

    def hparams(self, settings: Mapping[str, Any], metrics: tuple[str, ...]) -> None:
        """Write the settings for the HPARAMS tab, with the tags of the curves that it shows beside them."""
        from torch.utils.tensorboard.summary import hparams

        plain = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in settings.items()}
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
            self._write(step=0, summary=summary)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Write everything out and close the file."""
        self._file.close()

    def _write(self, *, step: int = 0, **content: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **content)
        self._records.write(event.SerializeToString())


def read_events(path: Path) -> Iterator[tuple[Any, int]]:
    """Give each whole event of a file, and the offset at which it ends.

    A record that a kill or a power cut left short, empty or unreadable ends the reading.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    size = path.stat().st_size
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            if not length or file.tell() + length + 4 > size:
                return
            record = file.read(length + 4)
            try:
                event = Event.FromString(record[:length])
            except DecodeError:
                return
            yield event, file.tell()


def _cut(path: Path, keep_steps: int) -> None:
    end = 0
    for event, offset in read_events(path):
        if event.step > keep_steps:
            break
        end = offset
    with path.open("rb") as source, replacing(path) as aside:
        aside.write_bytes(source.read(end))


def cut_metrics(path: Path, keep_steps: int) -> None:
    """Drop the lines of metrics.jsonl after a step, and one that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= keep_steps
        except (ValueError, KeyError, TypeError):
            is_kept = False
        if not is_kept:
            break
        kept.append(line)
    with replacing(path) as aside:
        aside.write_bytes(b"".join(kept))


def write_embeddings(
    folder: Path, vectors: NDArray[np.float32], labels: Sequence[tuple[str, str]], images: NDArray[np.uint8]
) -> None:
    """Write what the PROJECTOR tab shows of N images, in place of what is there.

    Args:
        folder: that of the events.
        vectors: (N, D).
        labels: class and name of each image.
        images: uint8 (N, h, w, 3), the dots' pictures; so small that their grid fits a side of 8192.
    """
    N, h, w, _ = images.shape
    side = math.ceil(math.sqrt(N))
    sprite = np.zeros((side * side, h, w, 3), np.uint8)
    sprite[:N] = images
    grid = Image.fromarray(rearrange(sprite, "(a b) h w c -> (a h) (b w) c", a=side))
    png = io.BytesIO()
    grid.save(png, format="PNG")
    rows = ["class\timage", *("\t".join(map(printable, row)) for row in labels)]
    config = f"""embeddings {{
  tensor_name: "val"
  tensor_path: "embeddings.tsv"
  metadata_path: "embeddings-names.tsv"
  sprite {{ image_path: "embeddings.png" single_image_dim: {w} single_image_dim: {h} }}
}}
"""
    for name, data in (
        ("embeddings.tsv", "".join("\t".join(f"{x:.6g}" for x in row) + "\n" for row in vectors.tolist()).encode()),
        ("embeddings-names.tsv", ("\n".join(rows) + "\n").encode()),
        ("embeddings.png", png.getvalue()),
        ("projector_config.pbtxt", config.encode()),  # last: it names the others
    ):
        with replacing(folder / name) as aside:
            aside.write_bytes(data)
