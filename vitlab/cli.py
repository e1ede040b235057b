"""The command line: one table of commands, and parsing only. Nothing here imports torch.

Each command takes a dataclass of options and lives in `vitlab.commands` under its own name.
"""

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice, takewhile
from typing import IO, Any, NoReturn, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings

from vitlab.config import RunConfig, shipped_config
from vitlab.errors import InputError, unknown_name
from vitlab.options import (
    CheckOptions,
    CompareOptions,
    EvaluateOptions,
    ExplainOptions,
    ModelsOptions,
    PredictOptions,
    ProbeOptions,
    ReplayOptions,
)
from vitlab.parsing import check_yaml
from vitlab.pixel_options import CompleteOptions, PaletteOptions, SampleOptions

_parser_loads_yaml = get_loader("yaml")
DIGITS_RECIPE = "digits/vit.yaml"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the table."""

    help: str
    options: type
    """Dataclass whose fields are the command's options."""
    positionals: tuple[tuple[str, str | None], ...] = ()
    """Fields that stand on the line without a name, each with argparse's nargs."""


COMMANDS = {
    "check": Command(
        help="Look at every image of a data set and say what is wrong.",
        options=CheckOptions,
        positionals=(("data", None),),
    ),
    "train": Command(help="Train a network on a folder of images.", options=RunConfig),
    "evaluate": Command(
        help="Score a model file on a split.", options=EvaluateOptions, positionals=(("checkpoint", None),)
    ),
    "predict": Command(
        help="Classify image files and folders.",
        options=PredictOptions,
        positionals=(("checkpoint", None), ("paths", "+")),
    ),
    "compare": Command(
        help="Compare two runs on the same images.",
        options=CompareOptions,
        positionals=(("run_a", None), ("run_b", None)),
    ),
    "probe": Command(
        help="See which layer's features tell classes apart.", options=ProbeOptions, positionals=(("checkpoint", None),)
    ),
    "palette": Command(help="Fit the colours of an ImageGPT to a data set.", options=PaletteOptions),
    "sample": Command(help="Draw images with an ImageGPT.", options=SampleOptions, positionals=(("checkpoint", None),)),
    "complete": Command(
        help="Draw the lower part of images anew with an ImageGPT.",
        options=CompleteOptions,
        positionals=(("checkpoint", None), ("images", "+")),
    ),
    "explain": Command(
        help="Show what a network looks at in images.",
        options=ExplainOptions,
        positionals=(("checkpoint", None), ("images", "+")),
    ),
    "replay": Command(
        help="Make a piece of a run again and compare the bits.", options=ReplayOptions, positionals=(("state", None),)
    ),
    "models": Command(help="List the networks, or propose some for a size of image.", options=ModelsOptions),
}


class Parser(ArgumentParser):  # type: ignore[misc]
    """A parser whose errors are one line: what was given, what is needed, and the nearest valid name."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the line instead of printing a usage and a traceback."""
        raise InputError(_one_line(message, self._option_names()))

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        (file or sys.stderr).write(message)  # argparse would keep silent of a full disk

    def _option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def parse(arguments: Sequence[str]) -> tuple[str, Any]:
    """Read a command line.

    Returns:
        The command's name and its options; the name is `version` or `help` for those.

    Raises:
        InputError: the line is wrong; the message says how.
        SystemExit: help was asked for and printed.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        return "help", overview()
    if name == "--version":
        return "version", None
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    return name, _parse_command(name, list(rest))


def overview() -> str:
    """Give the text of `vitlab --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "vitlab trains, evaluates and runs vision transformers on your own image folders.\n\n"
        f"usage: vitlab COMMAND ...\n\n{rows}\n\n"
        "  vitlab COMMAND --help  explains a command's options\n"
        "  vitlab --version       describes this installation, for bug reports\n"
    )


def _parse_command(name: str, arguments: list[str]) -> Any:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    from yaml import YAMLError

    set_loader("yaml", _load_yaml, exceptions=(YAMLError,))
    command = COMMANDS[name]
    parser = Parser(prog=f"vitlab {name}", description=command.help, allow_abbrev=False)
    if command.options is RunConfig:
        return _parse_run(parser, arguments)
    helps = _field_helps(command.options)
    for field, nargs in command.positionals:
        parser.add_argument(field, nargs=nargs, type=str, help=helps[field])
    skipped = {field for field, _ in command.positionals}
    for flag in (field.name for field in fields(command.options) if field.default is False):
        parser.add_argument(f"--{flag}", action="store_true", help=helps[flag])
        skipped.add(flag)
    for several in (field.name for field in fields(command.options) if field.default_factory is list):
        parser.add_argument(f"--{several}", nargs="+", type=str, default=[], help=helps[several])
        skipped.add(several)
    words = {field.name.rstrip("_"): field.name for field in fields(command.options) if field.name.endswith("_")}
    for word, keyword in words.items():  # a word that Python keeps for itself
        parser.add_argument(f"--{word}", type=str, help=helps[keyword])
        skipped.add(keyword)
    parser.add_class_arguments(command.options, None, skip=skipped)
    namespace = parser.parse_args(arguments)
    return command.options(**{words.get(name, name): value for name, value in namespace.as_dict().items()})


def _load_yaml(text: str) -> Any:
    check_yaml(text)
    return _parser_loads_yaml(text)


def _parse_run(parser: Parser, arguments: list[str]) -> RunConfig:
    """Read a run's configuration: the file first, then what stands on the line, wherever `--config` stands in it.

    Where neither a file nor data nor a network nor weights are named, the recipe for the built-in digits is the file.
    """
    parser.add_argument("--config", action="config", help="YAML file; what stands on the line after it wins.")
    parser.add_class_arguments(RunConfig, None)
    arguments = _join_lists(_files_first(arguments))
    try:
        return _read_run(parser, arguments)
    except InputError as error:
        raise _naming_its_file(error, parser, arguments) from error


def _read_run(parser: Parser, arguments: list[str]) -> RunConfig:
    try:
        namespace = parser.parse_args(arguments)
        named = namespace.config, namespace.model.name, namespace.model.weights
        if named == (None, None, None) and namespace.data.root == RunConfig().data.root:
            namespace = parser.parse_args(["--config", str(shipped_config(DIGITS_RECIPE)), *arguments])
        return _build(parser, namespace)
    except (InputError, OSError):
        raise
    except Exception as error:  # YAML can hold anything, and the parser meets some of it unprepared
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the configuration cannot be read ({reason}): compare it with --print_config") from error


def _naming_its_file(error: InputError, parser: Parser, arguments: list[str]) -> InputError:
    """Put a file's name before an error that the file alone gives, too."""
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        file = value or "".join(arguments[at + 1 : at + 2])
        if name != "--config" or not file or file in str(error):
            continue
        try:
            _read_run(parser, ["--config", file])
        except InputError as alone:
            if str(alone) == str(error):
                return InputError(f"{file}: {error}")
    return error


def _files_first(arguments: list[str]) -> list[str]:
    """Move `--config FILE` and `--config=FILE` to the front; the parser lets a later file undo what stands before."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            files += [argument, *islice(rest, 1)]
        elif argument.startswith("--config="):
            files.append(argument)
        else:
            others.append(argument)
    return files + others


def _join_lists(arguments: list[str]) -> list[str]:
    """Turn `--train.seeds 1 2 3` into `--train.seeds [1,2,3]` wherever a field takes several values."""
    lists = _list_options()
    joined: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        joined.append(argument)
        if argument not in lists:
            continue
        values = list(takewhile(lambda value: re.fullmatch(_NUMBER, value), arguments[position:]))
        if len(values) > 1 or (values and lists[argument]):
            joined.append(f"[{','.join(values)}]")
            position += len(values)
    return joined


_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"


def _list_options() -> dict[str, bool]:
    """Name the options that take several numbers, and tell of each whether it takes nothing else."""
    options = {}
    for section, config in get_type_hints(RunConfig).items():
        for name, hint in get_type_hints(config).items():
            kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
            tuples = [kind for kind in (hint, *kinds) if get_origin(kind) is tuple]
            if tuples:
                options[f"--{section}.{name}"] = hint in tuples or len(kinds) == 1
    return options


def _build(parser: Parser, namespace: Namespace) -> RunConfig:
    values = parser.instantiate(namespace)
    return RunConfig(**{field.name: values[field.name] for field in fields(RunConfig)})


def _field_helps(options: type) -> dict[str, str]:
    from docstring_parser import parse_from_object

    return {param.arg_name: param.description or "" for param in parse_from_object(options).params}


_MAIN_FIELDS = {"data": "root", "model": "name", "optim": "name", "train": "run_dir"}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple": "a list",
    "dict": "fields",
}


def _one_line(message: str, options: list[str]) -> str:
    """Turn a parser's message into one line in the words of the command line."""
    text = re.sub(r'^Parser key "([\w.]+)": ', r"--\1: ", " ".join(message.split()))
    text = re.sub(r"^Option '([\w.]+)' is not accepted.*", r"unrecognized arguments: --\1", text)
    if match := re.search(
        r"[Uu]nrecognized arguments: (--?[\w.-]+|.+?(?= --|$))|Group '(\w+)' does not accept option '?([\w.-]+)", text
    ):
        given = match[1] or f"--{match[2]}.{match[3]}"
        nearest = difflib.get_close_matches(given, options, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else "--help lists the options"
        if not given.startswith("-"):
            takers = ["--config"] if given.endswith((".yaml", ".yml")) else ["--data.root", "--data"]
            taker = next((option for option in takers if option in options), None)
            value = "FOLDER" if " " in given else given  # one with spaces, or several
            hint = f"did you mean {taker} {value}?" if taker else "--help lists the options"
            return f"unknown argument {given}: {hint}"
        return f"unknown option {given}: {hint}"
    if match := re.match(r"--(\w+): Unable to load config '(.*?)'", text):
        field = _MAIN_FIELDS.get(match[1])
        hint = f"did you mean --{match[1]}.{field} {match[2]}?" if field else "--help lists its options"
        return f"--{match[1]} takes a YAML file of its section, and {match[2]} is none: {hint}"
    if match := re.match(r"--config: (File does not exist|Path is not a file): (['\"])(.*)\2", text):
        what = "does not exist" if match[1].startswith("File") else "is no file"
        return f"--config {match[3]} {what}: give a YAML file, such as a run's config.yaml"
    if match := re.match(r"(?:Unexpected config:$|Problems parsing config: (.*))", text):
        problem = _yaml_problem(match[1] or "it is empty")
        return f"no YAML with sections of fields, such as `optim: {{lr: 0.001}}`: {problem}"
    if match := re.match(r"argument (--\S+): expected .*argument", text):
        return f"{match[1]} stands without a value: give one behind it"
    if match := re.match(r"Unexpected config: (.{1,40})", text):
        return f"a configuration has sections of fields, such as `optim: {{lr: 0.001}}`, and here is {match[1]}"
    if match := re.search(r"arguments are required: (.*)", text):
        names = [name if f"--{name}" not in options else f"--{name}" for name in match[1].split(", ")]
        return f"missing {', '.join(names)}: --help lists what the command needs"
    if match := re.match(r"(--\S+): Expected an? (.*)\. Got value: (.*)", text):
        return f"{match[1]} is {match[3]}: give {_type_in_words(match[2])}"
    if match := re.match(r"(--\S+): Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: (.*)", text):
        kinds = [_type_in_words(kind) for kind in re.split(r", (?![^\[]*\])", match[2]) if "NoneType" not in kind]
        return f"{match[1]} is {match[3]}: give {' or '.join(kinds)}"
    return text


def _yaml_problem(reason: str) -> str:
    """Put a place that a YAML parser names, the last where it names two, before what it finds there."""
    places = re.findall(r"line \d+, column \d+", reason)
    what = re.sub(r' in "<unicode string>", line \d+, column \d+', ",", reason).strip(" ,")
    return f"{places[-1]}: {what}" if places else what


def _type_in_words(kind: str) -> str:
    kind = re.sub(r"<class '(\w+)'>", r"\1", kind)
    if match := re.fullmatch(r"typing\.Literal\[(.*)\]", kind):
        return f"one of {match[1]}".replace("'", "")
    if match := re.fullmatch(r"tuple\[(.*)\]", kind):
        return f"[{match[1]}]"
    return _TYPES.get(kind, kind)
