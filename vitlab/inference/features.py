"""What each layer of a network says of an image as a whole: one vector an image and layer.

Layer l, counted from 1, is the output of the l-th block. Each position of it is normalised, then the mean over the
positions is taken. The normalisation is that of the network's next block or final norm, root mean square for ImageGPT
and LayerNorm for all others, without gain and shift: both act on each number of the vector alone and pass through the
mean, so that standardising the vectors would undo them. It gives every position the same say, and layers, whose sums
grow with depth, one scale.

- ImageGPT: the positions are the pixels. This is the paper's f^l, the pooled normed input of the block after the l-th,
  and at the last layer the pooled final norm. The paper's f^0, of no block at all, is left out.
- ViT: the patches, without the class token, with either pool, as timm gives its own ViTs' layers.
- Swin and DaViT: the positions of the stage's map, before the step down to the next stage.
- timm/NAME: the positions of each map that timm names, after a block or, in most pyramids, after a stage.

Source: Chen et al., Generative Pretraining from Pixels, ICML 2020, sec. 2.4.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.images import ImageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess
from vitlab.engine.packing import packed
from vitlab.models.imagegpt import ImageGPT
from vitlab.models.network import BlockNetwork, Network, device_of
from vitlab.models.timm_network import TimmNetwork
from vitlab.models.vit import VisionTransformer

_EPS = 1e-5


@dataclass(frozen=True)
class Features:
    """Images as vectors; N counts those that could be read."""

    layers: dict[int, NDArray[np.float32]]
    """Of each layer (N, D), whose width may differ from layer to layer."""
    labels: NDArray[np.int64]
    """Class of each image, (N,)."""
    errors: tuple[ImageError, ...]
    """Images that could not be read."""


def pooled_layers(network: Network, images: Tensor) -> Iterator[Tensor]:
    """Give each layer's vectors `(B, D)` in turn; of our own networks, one layer is in memory at a time.

    Args:
        network: in evaluation mode.
        images: float `(B, C, H, W)`, normalised.
    """
    if isinstance(network, BlockNetwork):
        outputs = network.block_outputs(images)
    else:
        outputs = iter(network.forward_intermediates(images))
    for output in outputs:
        positions = _positions(network, output)
        width = positions.shape[-1:]
        if isinstance(network, ImageGPT):
            normalised = F.rms_norm(positions, width, eps=_EPS)
        else:
            normalised = F.layer_norm(positions, width, eps=_EPS)
        yield normalised.mean(dim=1)


def _positions(network: Network, output: Tensor) -> Tensor:
    """Give a block's output as one row of positions, `(B, N, D)`."""
    if isinstance(network, TimmNetwork):
        return rearrange(output, "b d h w -> b (h w) d")
    if isinstance(network, VisionTransformer):
        return output[:, 1:]
    return rearrange(output, "b ... d -> b (...) d")


@torch.inference_mode()
def count_layers(network: Network) -> int:
    """Count the layers, by a blank image."""
    height, width = network.image_size
    blank = torch.zeros(1, network.in_channels, height, width, device=device_of(network))
    return sum(1 for _ in pooled_layers(network, blank))


@torch.inference_mode()
def read_features(
    network: Network,
    preprocess: Preprocess,
    batches: Iterable[Batch],
    layers: Collection[int],
    *,
    on_batch: Callable[[int], None] | None = None,
) -> Features:
    """Pool some layers of a network over batches of images; no more than the vectors is kept.

    Args:
        network: in evaluation mode, with float32 weights.
        preprocess: the model's own.
        batches: uint8 images `(B, C, H, W)`.
        layers: numbers from 1 on; blocks after the last of them do not run.
        on_batch: told the number of images after each batch.

    Raises:
        InputError: no image could be read.
    """
    device, last = device_of(network), max(layers)
    parts: dict[int, list[NDArray[np.float32]]] = {layer: [] for layer in layers}
    labels: list[NDArray[np.int64]] = []
    errors: list[ImageError] = []
    with packed(network):
        for batch in batches:
            errors += batch.errors
            if len(batch.labels):
                images = preprocess.normalize(batch.images.to(device, non_blocking=True))
                with torch.autocast(device.type, enabled=False):
                    for layer, vectors in enumerate(pooled_layers(network, images), start=1):
                        if layer in parts:
                            parts[layer].append(vectors.cpu().numpy())
                        if layer == last:
                            break
                labels.append(batch.labels.numpy())
            if on_batch is not None:
                on_batch(len(batch.labels) + len(batch.errors))
    if not labels:
        raise errors[0] if errors else AssertionError("batches without images")
    return Features(
        {layer: np.concatenate(parts.pop(layer)) for layer in layers}, np.concatenate(labels), tuple(errors)
    )
