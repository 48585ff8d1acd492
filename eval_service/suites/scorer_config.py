"""`scorer`, as written in a suites file: a name, or a table with the scorer's own keys.

    scorer = "exact"
    scorer = { name = "regex", pattern = 'answer is (\\w+)' }

Invariant: whatever can be known to be wrong before a sample is scored (a pattern that is none, a schema that is none)
is refused here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from eval_service.fleet_config import Section

_Pattern = Annotated[str, Field(min_length=1)]
TEMPLATE_FIELDS = ("prompt", "output", "answer")


class ScorerBase(Section):
    """What every scorer has; `options` are what its function is called with beside output and answer."""

    metric_name: ClassVar[str]
    more_metrics: ClassVar[tuple[str, ...]] = ()
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="of one sample")

    @property
    def metric(self) -> str:
        """The name of the metric that the mean of its scores is."""
        return self.metric_name

    @property
    def needs_answer(self) -> bool:
        """Whether each row must have one."""
        return True

    @property
    def called(self) -> str:
        """The registered function that does it."""
        return str(self.model_dump()["name"])

    @property
    def options(self) -> dict[str, Any]:
        """Of the function."""
        return self.model_dump(mode="json", exclude={"name", "timeout_s"})


class Exact(ScorerBase):
    """The whole output is the answer."""

    metric_name = "exact_match"
    name: Literal["exact"] = "exact"
    ignore_case: bool = False


class Contains(ScorerBase):
    """The answer is somewhere in the output."""

    metric_name = "contains"
    name: Literal["contains"] = "contains"
    ignore_case: bool = False


class Regex(ScorerBase):
    """What a pattern finds in the output is the answer."""

    metric_name = "regex_match"
    name: Literal["regex"]
    pattern: _Pattern = Field(description="its first group, or all of it where it has none, is the answer")
    take: Literal["first", "last"] = "last"
    ignore_case: bool = False

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        return checked_pattern(value)


class Numeric(ScorerBase):
    """The last number in the output is the number in the answer, as GSM8K is scored."""

    metric_name = "numeric_match"
    name: Literal["numeric"]
    tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False, description="relative to the answer")


class Math(ScorerBase):
    """The output's expression equals the answer's, by math-verify."""

    metric_name = "math_equal"
    name: Literal["math"]


class JsonSchema(ScorerBase):
    """The output is JSON that fits a schema: this one, or the one in the row's answer."""

    metric_name = "valid"
    name: Literal["json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, description="None: the row's answer holds one")

    @property
    def needs_answer(self) -> bool:
        """It holds the schema, if none is given here."""
        return self.json_schema is None

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        import jsonschema

        kind = jsonschema.validators.validator_for(value)
        try:
            kind.check_schema(value)
        except jsonschema.SchemaError as exc:
            raise ValueError(f"it is no JSON schema: {exc.message}") from exc
        return value


class Rouge(ScorerBase):
    """ROUGE-L of the output against the answer, by rouge-score; ROUGE-1 and ROUGE-2 beside it."""

    metric_name = "rougeL"
    more_metrics = ("rouge1", "rouge2")
    name: Literal["rouge"]
    stem: bool = False


class Chrf(ScorerBase):
    """chrF of the output against the answer, by sacrebleu, from 0 to 1."""

    metric_name = "chrf"
    name: Literal["chrf"]
    word_order: int = Field(default=0, ge=0, le=6, description="2 is chrF++")


class MultipleChoice(ScorerBase):
    """The choice that the model finds likeliest; no text is generated."""

    metric_name = "acc"
    more_metrics = ("acc_norm",)
    name: Literal["multiple_choice"]


class Code(ScorerBase):
    """The output, run as a program together with the row's answer as its tests, ends well."""

    metric_name = "passed"
    name: Literal["code"]
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False, description="of one sample, its start included")
    run_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False, description="of the program")
    memory_mb: int = Field(default=512, ge=64)
    prepend_prompt: bool = Field(default=False, description="the program begins with the prompt, as in HumanEval")

    @property
    def options(self) -> dict[str, Any]:
        """Of the function."""
        return self.model_dump(mode="json", include={"run_timeout_s", "memory_mb"})

    @model_validator(mode="after")
    def _ends_in_time(self) -> Code:
        if self.run_timeout_s >= self.timeout_s:
            raise ValueError(f"run_timeout_s: {self.run_timeout_s:g} s are not below timeout_s ({self.timeout_s:g})")
        return self


class Judge(ScorerBase):
    """A model of a frozen group says how good the output is."""

    metric_name = "judged"
    name: Literal["judge"]
    group: str = Field(min_length=1, description="a frozen group of fleet.toml")
    template: str = Field(description="the judge's prompt; {prompt}, {output} and {answer} stand for the sample's")
    verdict: _Pattern = Field(description="the verdict is its first group, or all of it where it has none")
    scores: dict[str, float] = Field(default_factory=dict, description="of verdicts; others are numbers in [0, scale]")
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_new_tokens: int = Field(default=256, ge=1)
    timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False, description="of one verdict, its wait included")

    @property
    def needs_answer(self) -> bool:
        """The template may do without."""
        return "{answer}" in self.template

    @field_validator("verdict")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        return checked_pattern(value)

    @field_validator("template")
    @classmethod
    def _shows_the_output(cls, value: str) -> str:
        if "{output}" not in value:
            raise ValueError("it does not hold {output}, so that the judge would not see what it judges")
        return value

    @property
    def options(self) -> dict[str, Any]:
        """Of the function that reads the verdict."""
        return self.model_dump(mode="json", include={"verdict", "scores", "scale"})

    def asked(self, *, prompt: str, output: str, answer: str) -> str:
        """The judge's prompt; what a sample holds is put in as it stands, braces and all."""
        given = {"prompt": prompt, "output": output, "answer": answer}
        return re.sub(r"\{(prompt|output|answer)\}", lambda found: given[found[1]], self.template)


class Function(ScorerBase):
    """A function of the user's, `module:function`, sync or async, of (output, answer, **options)."""

    metric_name = "score"
    name: Literal["function"]
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="`module:function`")
    metric_key: str = Field(default="score", pattern=r"^[A-Za-z][\w@^.-]*$", description="its metric's name")
    arguments: dict[str, Any] = Field(default_factory=dict, description="passed by name")

    @property
    def needs_answer(self) -> bool:
        """The function may do without."""
        return False

    @property
    def metric(self) -> str:
        """As it is named."""
        return self.metric_key

    @property
    def options(self) -> dict[str, Any]:
        """Of the function that calls it."""
        return {"function": self.function, "arguments": dict(self.arguments)}


ScorerConfig = Annotated[
    Exact | Contains | Regex | Numeric | Math | JsonSchema | Rouge | Chrf | MultipleChoice | Code | Judge | Function,
    Field(discriminator="name"),
]
SCORER_CONFIGS: dict[str, type[ScorerBase]] = {
    "exact": Exact,
    "contains": Contains,
    "regex": Regex,
    "numeric": Numeric,
    "math": Math,
    "json_schema": JsonSchema,
    "rouge": Rouge,
    "chrf": Chrf,
    "multiple_choice": MultipleChoice,
    "code": Code,
    "judge": Judge,
    "function": Function,
}


def checked_pattern(value: str) -> str:
    """A regular expression, or a ValueError that says what is wrong with it."""
    try:
        re.compile(value)
    except re.error as exc:
        raise ValueError(f"it is no regular expression: {exc}") from exc
    return value
