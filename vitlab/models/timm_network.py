"""Any network of timm behind the face that the engine knows."""

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.checks import is_number
from vitlab.errors import InputError, unknown_name
from vitlab.layers.patch import check_divides, check_images, to_pair
from vitlab.models.network import Network

PREFIX = "timm/"
_UNDER = "net."
_NATIVE_SIZE = (224, 224)
# What timm's builders take for themselves beside their signatures: no fields of a network's shape.
_TIMMS_OWN = frozenset({"features_only", "out_indices", "feature_cls", "pruned", "device", "dtype"})
_LARGEST = 2**20
_DEEPEST = 4
# Where timm's networks keep what they repeat, in the order in which to look.
_REPEATED = ("blocks", "stages", "layers", "layer1", "layer2", "layer3", "layer4")


class TimmNetwork(Network):
    """Wraps a network of timm; its parameters are timm's under `net.`.

    Fresh weights are timm's own; `model.weights` loads others.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int,
        image_size: int | tuple[int, int] | None,
        in_channels: int,
        overrides: Mapping[str, Any],
    ) -> None:
        """Build `timm/NAME` with fresh weights.

        Args:
            name: the name with the prefix `timm/`.
            num_classes: number K of logits.
            image_size: side, or (height, width), in pixels; default: the network's own.
            in_channels: channels C of the images.
            overrides: keyword arguments of timm's constructor, such as `drop_path_rate`.

        Raises:
            InputError: timm has no such network, or it does not take a setting.
        """
        super().__init__()
        self.name = name
        self.overrides = dict(overrides)
        self.num_classes, self.in_channels = num_classes, in_channels
        _check_overrides(name, overrides)
        size = None if image_size is None else _to_size(image_size)
        settings = {"num_classes": num_classes, "in_chans": in_channels, **overrides}
        self.net = _build(name.removeprefix(PREFIX), settings, size)
        self.image_size = size or _native_size(self.net)
        _refuse_cropping(self.net, self.image_size)
        _try_shapes(self.net, in_channels, self.image_size, name)
        if not isinstance(self.net.get_classifier(), nn.Module):
            raise InputError(f"{name} has several heads, which nothing here trains: take the network with one")

    def config_dict(self) -> dict[str, Any]:
        """Give classes, size, channels and the overrides."""
        return {
            "num_classes": self.num_classes,
            "image_size": list(self.image_size),
            "in_channels": self.in_channels,
            **self.overrides,
        }

    def forward_features(self, images: Tensor) -> Tensor:
        """Give timm's unpooled features, in the network's own shape."""
        check_images(images, image_size=self.image_size, in_channels=self.in_channels)
        features: Tensor = self.net.forward_features(images)
        return features

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Pool and classify; with `pre_logits` pool alone."""
        pooled: Tensor = self.net.forward_head(features, pre_logits=pre_logits)
        return pooled

    def forward_intermediates(self, images: Tensor) -> list[Tensor]:
        """Give the outputs that timm names for the network, block by block or stage by stage."""
        if not hasattr(self.net, "forward_intermediates"):
            raise InputError(f"timm gives no intermediate features of {self.name}: take another network")
        features: list[Tensor] = self.net.forward_intermediates(images, intermediates_only=True)
        return features

    def reset_classifier(self, num_classes: int) -> None:
        """Put timm's fresh head."""
        self.num_classes = num_classes
        device = next(self.net.parameters()).device
        self.net.reset_classifier(num_classes)
        self.net.to(device)

    def get_classifier(self) -> nn.Module:
        """Give timm's last layer."""
        classifier: nn.Module = self.net.get_classifier()
        return classifier

    def no_weight_decay(self) -> set[str]:
        """Name what timm names."""
        names = self.net.no_weight_decay() if hasattr(self.net, "no_weight_decay") else ()
        return {f"net.{name}" for name in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Give timm's patterns, for names under `net.`."""
        if not hasattr(self.net, "group_matcher"):
            raise InputError(f"timm does not order the layers of {self.name}: leave out layer decay and freezing")
        return {part: _under_net(pattern) for part, pattern in self.net.group_matcher(coarse=coarse).items()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass, where timm can."""
        try:
            self.net.set_grad_checkpointing(enable)
        except (AssertionError, AttributeError) as error:
            raise InputError(f"{self.name} cannot recompute its blocks: leave out train.grad_checkpointing") from error

    def adapt(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give weights of our names fitted as timm fits its own: tables and kernels resampled.

        What timm cannot fit stays as it is, and so does not match.
        """
        from timm.models import adapt_input_conv

        bare = {name.removeprefix(_UNDER): tensor for name, tensor in state.items()}
        fit = getattr(sys.modules[type(self.net).__module__], "checkpoint_filter_fn", None)
        if fit is not None:
            with suppress(KeyError, RuntimeError, ValueError, AssertionError, TypeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # timm's resampling of biases indexes in a way that torch deprecates
                bare = fit(bare, self.net)
        stems = self.net.pretrained_cfg.get("first_conv") or ()
        for stem in (stems,) if isinstance(stems, str) else stems:
            kernel = bare.get(f"{stem}.weight")
            if kernel is not None and kernel.ndim == 4 and kernel.shape[1] == 3 != self.in_channels:
                bare[f"{stem}.weight"] = adapt_input_conv(self.in_channels, kernel)
        return {f"{_UNDER}{name}": tensor for name, tensor in bare.items()}

    def repeated_blocks(self) -> list[nn.Module]:
        """Give the children of timm's lists of blocks, or the whole network where it has none."""
        lists = [getattr(self.net, name) for name in _REPEATED if isinstance(getattr(self.net, name, None), nn.Module)]
        blocks = [block for part in lists for stage in part.children() for block in _blocks_of(stage)]
        return blocks or [self.net]


def _check_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    """Raise InputError for what is no field of a network's shape: timm would open files or take a network apart for it.

    They may come from a model file, and so from anybody.
    """
    import timm

    own = {
        *inspect.signature(timm.create_model).parameters,
        *inspect.signature(timm.models.build_model_with_cfg).parameters,
    }
    for field, value in overrides.items():
        if field in _TIMMS_OWN | own:
            raise InputError(f"model.overrides.{field} is no field of {name}, but an order to timm: leave it out")
        if not _is_plain(value, depth=0):
            raise InputError(f"model.overrides.{field} of {name} is {str(value)[:80]}: give texts and sane numbers")


def _is_plain(value: Any, *, depth: int) -> bool:
    """Tell whether a value is a text, a number of sane size, or a short list or mapping of such."""
    if isinstance(value, list | tuple | dict):
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return depth < _DEEPEST and len(items) <= 100 and all(_is_plain(item, depth=depth + 1) for item in items)
    return value is None or isinstance(value, str | bool) or (is_number(value) and abs(value) <= _LARGEST)


def _build(name: str, settings: Mapping[str, Any], size: tuple[int, int] | None) -> Any:
    """Build timm's network for an image size, with the option that it takes for one, where it takes one."""
    import timm

    if not timm.is_model(name):
        raise unknown_name("timm network", name, timm.list_models())
    tries = [settings] if size is None else [{**settings, "img_size": size}, settings]
    for attempt in tries:
        try:
            return timm.create_model(name, pretrained=False, **attempt)
        except TypeError as error:  # an argument that this network does not take
            if attempt is tries[-1]:
                raise InputError(f"{PREFIX}{name} cannot be built: {error}") from error
        except InputError:
            raise
        except Exception as error:  # settings that do not fit raise nearly anything
            raise InputError(f"{PREFIX}{name} cannot be built: {error or 'timm refuses these settings'}") from error
    raise AssertionError("the last try either returns or raises")


def _to_size(image_size: Any) -> tuple[int, int]:
    """Give (height, width) of a side or a pair; a model file holds the pair as a list."""
    height, width = to_pair(tuple(image_size) if isinstance(image_size, list) else image_size)
    if not (type(height) is type(width) is int and min(height, width) > 0):
        raise InputError(f"image_size is {image_size!r}: give a side or (height, width) of more than 0 pixels")
    return height, width


def _native_size(net: Any) -> tuple[int, int]:
    _, *size = net.pretrained_cfg.get("input_size", (3, *_NATIVE_SIZE))
    return size[0], size[1]


def _refuse_cropping(net: Any, size: tuple[int, int]) -> None:
    """Raise InputError where timm's patches would leave a border of the image out without a word."""
    embed = getattr(net, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    if patch is not None and not getattr(embed, "dynamic_img_pad", False):
        check_divides(size, to_pair(tuple(patch) if isinstance(patch, list | tuple) else patch))


def _try_shapes(net: nn.Module, channels: int, size: tuple[int, int], name: str) -> None:
    """Raise InputError where the network's strides leave nothing of such an image; on shapes alone, without numbers."""
    try:
        with torch.no_grad():
            copy.deepcopy(net).to("meta").eval()(torch.empty(1, channels, *size, device="meta"))
    except NotImplementedError:  # an operation that torch knows only with numbers
        return
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{name} does not take images of {size[0]} x {size[1]} pixels ({reason}): give others"
        ) from error


def _under_net(pattern: Any) -> Any:
    """Rewrite timm's patterns: text, or a list of (text, order); not all alternatives in a text begin with `^`."""
    if isinstance(pattern, str):
        return r"^net\.(?:" + re.sub(r"(?<!\[)\^", "", pattern) + ")"
    if isinstance(pattern, list):
        return [_under_net(item) for item in pattern]
    if isinstance(pattern, tuple):
        return (_under_net(pattern[0]), *pattern[1:])
    return pattern


def _blocks_of(stage: nn.Module) -> list[nn.Module]:
    """Give the blocks of a stage that holds a list of them, or the stage itself as one."""
    inner = getattr(stage, "blocks", None)
    return list(inner.children()) if isinstance(inner, nn.Module) else [stage]
