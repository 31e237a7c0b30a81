"""Types of settings, which turn text of the command line or of YAML into checked values; `Length` and `Ramp`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from dino_ds.basics.files import unusable_text
from dino_ds.basics.names import as_written, did_you_mean


def option(default: Any, description: str, **facts: Any) -> Any:
    """Declare a setting: its default (... if it must be given) and the sentence that describes it in help. facts: more
    about it. shown: the default as help shows it. learned: False for a key of a recipe that does not change what is
    learned, so that a resumed run may change it. by_content: True for a key whose file a resumed run compares by
    content, and not by name. bare: True for an option that a positional argument of the command sets. stages: the ZeRO
    stages at which a key of a ds JSON acts. inside_run: True for a length that must not exceed the run's."""
    return Field(default, description=description, json_schema_extra=facts or None)


free_option = partial(option, learned=False)  # a key that a resumed run may change: it changes not what is learned


class Section(BaseModel):
    """Settings that belong together: a section of a recipe or of a ds JSON. `idle` and `refused` map values, such as
    "crops.mask none", to keys or sections that have no effect beside them: setting these gives a note, or an error.
    In values, "a|b" means either one, "!a" any but a; values with commas between them must all hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    idle: ClassVar[dict[str, str]] = {}
    refused: ClassVar[dict[str, str]] = {}


_T = TypeVar("_T")
Resume = bool | int | Literal["auto"]  # continue a run; "auto": if there is one; a number: from that step's checkpoint
MOST_PASSES = 2000  # most passes over the images that LightlyTrain advises; `train` and `advise` say so for longer runs
LEAST_IMAGES, FEW_IMAGES = 100, 2000  # fewest images to learn from: `advise` refuses fewer, `train` warns


@dataclass(frozen=True)
class Length:
    """A duration: optimizer steps, epochs (passes over the data) or images."""

    value: float
    unit: str
    begin: int = 0  # the step from which the length counts: the one at which a stage of training began

    def __str__(self) -> str:
        value = int(self.value) if self.value == int(self.value) else self.value
        return f"{value} {self.unit}" + (f" from step {self.begin}" if self.begin else "")

    @staticmethod
    def parse(text: object) -> Length:
        """Read "30 epochs", "1e6 images" or "30 steps from step 100"; a bare number is steps. Raises ValueError."""
        if isinstance(text, Length):
            return text
        begin = r"(?:\s+from\s+step\s+([0-9]{1,12}))?\s*"
        match = re.fullmatch(r"\s*([0-9.][0-9._]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)" + begin, str(text))
        units = {name: unit for unit in ("steps", "epochs", "images") for name in (unit, unit[:-1])} | {"": "steps"}
        with suppress(ValueError):
            if match and match[2].lower() in units and math.isfinite(float(match[1])):
                return Length(float(match[1]), units[match[2].lower()], begin=int(match[3] or 0))
        raise ValueError(f"{str(text)!r} is not a length: write '100 epochs', '5000 steps' or '1e6 images'")

    def share(self, text: object) -> str | None:
        """The part of this length that "10 %" names, as a length; None for a text of another form."""
        match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]+)?)\s*%\s*", str(text))
        return str(Length(float(Fraction(match[1]) * Fraction(repr(self.value)) / 100), self.unit)) if match else None

    def in_steps(self, global_batch: int, steps_per_epoch: int) -> int:
        """The optimizer step at which this length ends, rounded up; if it begins at 0, its number of steps."""
        per_unit = {"steps": Fraction(1), "epochs": Fraction(steps_per_epoch), "images": Fraction(1, global_batch)}
        # Exact decimals: 0.1 epochs of 30 steps are 3 steps, not 3.0000000000000004.
        return self.begin + math.ceil(Fraction(repr(self.value)) * per_unit[self.unit])


@dataclass(frozen=True)
class Ramp:
    """A number that goes from `start` to `end` by half a cosine over `length`, then stays; without `end` a constant."""

    start: float
    end: float | None = None
    length: Length | None = None

    def __str__(self) -> str:
        return _exact(self.start) + ("" if self.end is None else f"..{_exact(self.end)} over {self.length}")

    def __bool__(self) -> bool:
        return self.start > 0 or bool(self.end)


@dataclass(frozen=True)
class Drift:
    """A distance of features to those of the weights that a run started from, as preserve_loss measures it."""

    limit: float

    def __str__(self) -> str:
        return f"drift {_exact(self.limit)}"


def _exact(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def parse_ramp(value: object) -> Ramp:
    """A ramp from 0.1, "0.1", "0..2 over 1000 steps" or "0..2 over 1000 steps from step 500". Raises ValueError."""
    if isinstance(value, Ramp):
        return value
    first, dots, rest = str(value).partition("..")
    second, _, length = rest.partition("over")
    try:
        start, end = float(first), float(second) if dots else 0.0
    except ValueError:
        start, end = math.nan, 0.0
    if not (math.isfinite(start) and math.isfinite(end)) or (dots and not length.strip()):
        raise ValueError(f"{value!r} is not a weight: write a number, or such as '0..2 over 1000 steps'")
    if start < 0 or end < 0:
        raise ValueError(f"{value!r} is below 0: a weight is 0 or more")
    return Ramp(start, end, positive(_parse_stage_length(length))) if dots else Ramp(start)


def _parse_length(value: object) -> Length:
    length = _parse_stage_length(value)
    if length.begin:
        raise ValueError(f"{str(value)[:40]!r} counts from the beginning of the run: leave out 'from step'")
    return length


def _parse_stage_length(value: object) -> Length:
    length = Length.parse(value)
    if length.value > _MOST_COUNT:
        raise ValueError(f"{str(value)[:40]!r} is longer than can be counted here: at most {_MOST_COUNT:.0e}")
    return length


def positive(length: Length) -> Length:
    if length.value <= 0:
        raise ValueError(f"'{length}' must be more than 0")
    return length


def refuse(problem: Callable[[Any], str | Literal[False]]) -> AfterValidator:
    """A validator that refuses a value for which `problem` returns a sentence."""

    def check(value: object) -> object:
        if sentence := problem(value):
            raise ValueError(sentence)
        return value

    return AfterValidator(check)


def _split_range(value: object) -> object:
    return re.split(r"[,\s]+", value.strip("[]() ")) if isinstance(value, str) else value


def _parse_numbers(value: object) -> object:
    parts: Any = _split_range(value)
    try:
        return tuple(float(part) for part in (parts if isinstance(parts, list | tuple) else [parts]))
    except (TypeError, ValueError):
        raise ValueError(f"{as_written(value)} is not a number, nor several with commas between them") from None


def _parse_value_range(value: object) -> tuple[float, float] | Literal["auto"]:
    if value == "auto":
        return "auto"
    parts = _split_range(value)
    try:
        low, high = map(float, parts)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError(f"{as_written(value)} is not auto, nor two numbers such as 0,4095") from None
    if not (-_MOST_VALUE <= low < high <= _MOST_VALUE and high - low >= 1 / _MOST_VALUE):
        raise ValueError(f"{low:g},{high:g} is not a range: low < high, no more than {_MOST_VALUE:g}")
    return low, high


_MOST_COUNT = 10**12  # sums, products and nanoseconds stay far from the limits of 64 bits
_MOST_VALUE = 1e18  # the largest value of a pixel: differences and their inverses stay far from the limits of FP32


def split_words(value: object) -> object:
    """Split a string at commas and spaces; a single number becomes a tuple of one; a list stays as YAML gives it."""
    if isinstance(value, str):
        return tuple(w for w in re.split(r"[,\s]+", value.strip("[]() ")) if w)
    return (value,) if isinstance(value, int | float) else value


def once(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not parts:
        raise ValueError("it names nothing: give one, or several with commas between them")
    return tuple(dict.fromkeys(parts))


LengthField = Annotated[Length, BeforeValidator(_parse_length), PlainSerializer(str)]
StageLengthField = Annotated[Length, BeforeValidator(_parse_stage_length), PlainSerializer(str)]  # with "from step"
WeightField = Annotated[Ramp, PlainValidator(parse_ramp), PlainSerializer(str)]
AutoLength = Annotated[
    Length | Literal["auto"], PlainValidator(lambda v: v if v == "auto" else _parse_length(v)), PlainSerializer(str)
]
ValueRangeField = Annotated[tuple[float, float] | Literal["auto"], BeforeValidator(_parse_value_range)]
ChannelsField = Annotated[tuple[float, ...], BeforeValidator(_split_range)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_parse_numbers)]
ScaleRange = Annotated[tuple[float, float], BeforeValidator(_split_range)]
_AREAS = "a range of areas: two numbers with 0 < low <= high <= 1"
AreaRange = Annotated[ScaleRange, refuse(lambda two: not 0 < two[0] <= two[1] <= 1 and f"{list(two)} is not {_AREAS}")]
_TOO_MANY = f"is more than can be counted here: at most {_MOST_COUNT:.0e}"
_COUNTABLE = refuse(lambda number: number > _MOST_COUNT and f"{str(number)[:24]} {_TOO_MANY}")
Count = Annotated[int, Field(ge=1), _COUNTABLE]
Amount = Annotated[int, Field(ge=0), _COUNTABLE]
Listed = Annotated[tuple[_T, ...], BeforeValidator(split_words), AfterValidator(once)]  # repeated ones are dropped
Few = Annotated[int, Field(ge=0, le=1024)]
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
Seconds = Annotated[int, Field(ge=0, le=31_536_000)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Side = Annotated[int, Field(ge=1, le=16384)]
Width = Annotated[int, Field(ge=1, le=131072)]
Depth = Annotated[int, Field(ge=1, le=1024)]
PATH = refuse(unusable_text)  # marks keys that name a path: relative ones start in the folder in which the run began
PathText = Annotated[str, PATH]
Positive = Annotated[float, Field(gt=0)]
Gib = Annotated[float, Field(gt=0, le=2**20)]
CacheGib = Annotated[float, Field(ge=0, le=2**20)]
Temperature = Annotated[float, Field(gt=0, le=100)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction01 = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
MAX_WORKERS = 16  # most loader processes of a rank, unless data.workers says otherwise
PREFETCHED_BATCHES = 3  # per loader process; three cover one slow image without holding much memory
SOURCES = ("folder", "photos", "cifar10", "cifar100", "stl10", "imagenette", "food101", "flowers102", "pets", "eurosat")
HDF5 = (".h5", ".hdf5", ".he5")
ARCHIVES = (".tar", ".parquet", *HDF5)  # endings of files that hold many images (`dino_ds.data.root` opens them)
REMOTE_ARCHIVES = (".tar", ".parquet")  # read at an address too; their sources take cache_gib, the size of their cache
IMAGE_FORMS = "a folder of images, a .txt list of paths, .tar, .parquet, .h5"  # of data.root


def _is_code(name: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)*:\w+", name) is not None


def _source_problem(source: str) -> str:
    if source in SOURCES or _is_code(source):
        return ""
    known = f"{', '.join(SOURCES)}, nor a class of yours as module:Class.{did_you_mean(source, SOURCES)}"
    return f"{source!r} is not one of {known}"


SourceName = Annotated[str, refuse(_source_problem)]
_Code = Annotated[str, refuse(lambda name: not _is_code(name) and f"{name!r} is not a class of yours as module:Class")]
AllowedCode = Annotated[
    Listed[_Code] | None, option(..., "module:Class,...: code of yours that a file read here may name", shown="none")
]
