"""From images to class probabilities, with nothing but a model file.

The probabilities are calibrated: the logits are divided by the file's temperature, which was fitted to the validation
images, before the softmax. That changes no ranking. A file without a temperature gives the plain softmax.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitlab.data.images import read_image
from vitlab.data.loader import Batch
from vitlab.engine.device import resolve_device
from vitlab.engine.packing import pack
from vitlab.errors import InputError
from vitlab.models.files import checkpoint_path, load_model

ImageLike: TypeAlias = str | os.PathLike[str] | NDArray[np.uint8] | Image.Image
"""A path, an RGB array uint8 (H, W, 3), or a Pillow picture."""

# The modes whose conversion to RGB keeps the brightness; Pillow clips 16 and 32 bits.
_MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"))


class Predictor:
    """Classifies images with a model file: its network, its classes, its preprocessing, its temperature.

    Args:
        checkpoint: model file, or a run folder for its `best.safetensors`.
        device: `auto` (a GPU where there is one), cpu, cuda, cuda:N or mps.
        batch_size: images that go through the network at a time; the numbers do not depend on it beyond 1e-5.
        tta: test-time augmentation. `flip` takes the mean of the probabilities of an image and of its mirror image.

    Raises:
        InputError: the file is no model file of vitlab's or knows no classes, or the device is not there.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        device: str = "auto",
        batch_size: int = 32,
        tta: Literal["none", "flip"] = "none",
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}: give 1 or more")
        self.device, self.batch_size, self.tta = resolve_device(device), batch_size, tta
        file = load_model(Path(checkpoint), device=self.device)
        self.path = checkpoint_path(Path(checkpoint))
        file.require_classes(checkpoint)
        self.network = file.network.float().eval()
        # Products of few rows round by their number: a resumed prediction, with other batches, would give other rows.
        self.network.skips_unused = False
        pack(self.network)
        self.classes, self.preprocess, self.temperature = file.classes, file.preprocess, file.temperature

    def predict(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        """Give each image's class probabilities, calibrated by the file's temperature.

        Args:
            images: N paths, RGB arrays uint8 (H, W, 3) or Pillow pictures, mixed as you like.

        Returns:
            float32 (N, K) in the order of the images and of `classes`; each row sums to 1.

        Raises:
            ImageError: a file cannot be read as an image (`predict_files` goes on without it).
            InputError: an array is not an RGB image.
        """
        if isinstance(images, str | os.PathLike | Image.Image):
            raise InputError(f"images is one {type(images).__name__}: give a list, such as [image]")
        N, K = len(images), len(self.classes)
        probabilities = np.empty((N, K), np.float32)
        for start in range(0, N, self.batch_size):
            stop = min(start + self.batch_size, N)
            pixels = np.stack([self._prepare(images[i], i) for i in range(start, stop)])
            # A view: channels-last memory, as a Loader's batches have.
            batch = rearrange(torch.from_numpy(pixels), "b h w c -> b c h w")
            probabilities[start:stop] = self.predict_batch(batch)
        return probabilities

    def predict_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
        """Give each of a Loader's batches with the probabilities (B, K) of its images."""
        for batch in batches:
            yield batch, self.predict_batch(batch.images)

    @torch.inference_mode()
    def predict_batch(self, images: torch.Tensor) -> NDArray[np.float32]:
        """Give the probabilities of images that are preprocessed.

        Args:
            images: uint8 (B, C, h, w), as a Loader gives them; B may be 0.

        Returns:
            float32 (B, K).
        """
        if not len(images):
            return np.empty((0, len(self.classes)), np.float32)
        with self._in_float32():
            return _mean([self._probabilities(self.network(view)) for view in self._views(images)])

    @torch.inference_mode()
    def embed_batch(self, images: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Give the probabilities of images that are preprocessed, and what the head's last layer makes them of.

        Args:
            images: uint8 (B, C, h, w), as a Loader gives them; B may be 0.

        Returns:
            float32 (B, K), those of `predict_batch`, and the embeddings (B, D): the pooled features, timm's
            `forward_head(..., pre_logits=True)`. Of several views of an image both are means.
        """
        if not len(images):
            _, embeddings = self.embed_batch(images.new_zeros(1, *images.shape[1:]))
            return np.empty((0, len(self.classes)), np.float32), embeddings[:0]
        with self._in_float32():
            features = [self.network.forward_features(view) for view in self._views(images)]
            embeddings = _mean([self.network.forward_head(each, pre_logits=True) for each in features])
            return _mean([self._probabilities(self.network.forward_head(each)) for each in features]), embeddings

    def _in_float32(self) -> torch.autocast:
        return torch.autocast(self.device.type, enabled=False)  # a caller's autocast would cost the last digits

    def _views(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Give the network's input, and its mirror image where that counts, too."""
        inputs = self.preprocess.normalize(images.to(self.device, non_blocking=True))
        return [inputs, inputs.flip(-1)] if self.tta == "flip" else [inputs]

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits / self.temperature).softmax(dim=1)

    def _prepare(self, image: ImageLike, index: int) -> NDArray[np.uint8]:
        if isinstance(image, str | os.PathLike):
            return self.preprocess.apply(read_image(image))
        if isinstance(image, Image.Image):
            if image.mode not in _MODES:
                raise InputError(f"image {index} has mode {image.mode}: give its path, or picture.convert('RGB')")
            return self.preprocess.apply(np.asarray(ImageOps.exif_transpose(image).convert("RGB")))
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise InputError(f"image {index} is {what}: give a path or RGB pixels as a uint8 array (H, W, 3)")
        return self.preprocess.apply(image)


def _mean(views: Sequence[torch.Tensor]) -> NDArray[np.float32]:
    """Give the mean of the views' (B, ...) as an array; of one view its own bits."""
    mean: NDArray[np.float32] = (sum(views[1:], start=views[0]) / len(views)).cpu().numpy()
    return mean
