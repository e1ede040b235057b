"""The run's configuration: its sections together, and YAML in and out.

Imports the standard library only (PyYAML where a file is read or written), so that the command line starts at once.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from vitlab.checks import require
from vitlab.course_sections import MonitorConfig, ObjectiveConfig, OptimConfig, TrainConfig
from vitlab.errors import InputError, unknown_name
from vitlab.sections import (
    AugmentConfig,
    DataConfig,
    Interpolation,
    ModelConfig,
    ResizeMode,
    Schedule,
    WeightsKind,
)

__all__ = [
    "AugmentConfig",
    "DataConfig",
    "Interpolation",
    "ModelConfig",
    "MonitorConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "ResizeMode",
    "RunConfig",
    "Schedule",
    "TrainConfig",
    "WeightsKind",
    "shipped_config",
]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            is_section = dataclasses.is_dataclass(getattr(self, section.name))
            require(is_section, f"{section.name} is no section: give it fields, such as `{section.name}: {{...}}`")
        mixes = self.augment.mixup > 0 or self.augment.cutmix > 0
        require(
            not (self.objective.generates and (mixes or self.augment.erasing > 0)),
            "augment.mixup, cutmix and erasing would make up colours for the network to learn, and objective.name is "
            f"{self.objective.name}: leave them out",
        )
        require(
            self.objective.classifies or self.data.sampling != "balanced",
            f"data.sampling balanced is for classes, and objective.name is {self.objective.name}: leave it out",
        )
        require(
            not mixes or self.train.steps is not None or self.augment.unmixed_epochs < self.train.epochs,
            f"augment.unmixed_epochs {self.augment.unmixed_epochs} leaves none of {self.train.epochs} epochs to mix: "
            "give less, or no mixup and cutmix",
        )
        require(
            self.data.sampling != "balanced" or self.objective.class_weights != "balanced",
            "data.sampling and objective.class_weights are both balanced, which would count rare classes twice: "
            "give one of them",
        )

    def to_dict(self) -> dict[str, Any]:
        """Give nested plain dictionaries and lists, as YAML and JSON hold them."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> "RunConfig":
        """Rebuild a configuration from `to_dict`.

        Raises:
            InputError: a section or a field is unknown, or a value does not fit.
        """
        built: dict[str, Any] = {}
        for name, config in get_type_hints(cls).items():
            values = sections.get(name, {})
            require(isinstance(values, dict), f"{name} is {values!r}: give fields, such as `{name}: {{...}}`")
            known = get_type_hints(config)
            for key in values:
                if key not in known:
                    raise unknown_name(f"field of {name}", key, known)
            try:
                built[name] = config(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
            except TypeError as error:  # a file from elsewhere may hold a text in the place of a number
                raise InputError(f"{name} holds a value of another kind than its field ({error})") from error
        return cls(**built)

    def to_yaml(self) -> str:
        """Give the configuration as YAML without what says where runs lie and how many: that does not change one."""
        import yaml

        sections = self.to_dict()
        for name in ("run_dir", "resume", "seeds", "find_lr"):
            del sections["train"][name]
        return str(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def shipped_config(name: str) -> Path:
    """Find a configuration that comes with vitlab, such as `digits/vit.yaml`.

    It lies in `vitlab/configs` of an installed wheel and in `configs` beside the package in a checkout.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"no shipped configuration {name}: reinstall vitlab, or give --config a file")
