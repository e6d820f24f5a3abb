"""Request bodies, as clients of OpenAI and vLLM send them. Other fields are refused by name.

What is listed is honoured, or refused where it is read, with its name. Types are strict: a number
in quotes is an error, not a number. Ranges of sampling fields are checked by
:class:`minuet.engine.types.SamplingParams`, in one place for every way in.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 128
MAX_PROMPTS = 4096
_INT64 = 2**63 - 1

_MAX_FIELDS = 256
_MAX_BIASES = 4096


def _small(value: Any) -> Any:
    """A mapping that is checked entry by entry is refused first if it has too many.

    Each wrong entry would be an error of its own: a body of a few megabytes holds a million, and
    collecting them takes longer than anyone should be able to stop the server for. Lists end at
    their first error (``fail_fast``) for the same reason.
    """
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"has {len(value)} entries, at most {_MAX_BIASES} are read")
    return value


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stops = Annotated[list[str], Field(max_length=64, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
ManyIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class Strict(BaseModel):
    """No unknown fields, no conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > _MAX_FIELDS:
            raise ValueError(f"has {len(data)} fields, at most {_MAX_FIELDS} are read")
        return data


class StreamOptions(Strict):
    """What a stream contains besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """A named schema."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Strict):
    """vLLM's way to say the same; exactly one is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class SamplingFields(Strict):
    """Fields of every request that draws tokens. None: the default of the model or the API."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_small)] = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: str | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    prompt_logprobs: Count | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    service_tier: str | None = None


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: str | TokenIds | Annotated[Texts | ManyIds, Field(max_length=MAX_PROMPTS)]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: int | None = None


class TextPart(Strict):
    """A piece of text in a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None


Parts = Annotated[list[TextPart], Field(fail_fast=True)]


class FunctionCall(Strict):
    """The function of a tool call."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One message. Clients send back what they received, so its empty fields are known too."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """A tool by name."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=512, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_small)] = None
    store: bool | None = None
    modalities: Texts | None = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class ResponsesTextFormat(Strict):
    """What the text of a response must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponsesText(Strict):
    """The text of a response."""

    format: ResponsesTextFormat | None = None
    verbosity: None = None


class ResponsesReasoning(Strict):
    """How a response is thought about."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesTool(Strict):
    """A function, in the flat form of this route."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputMessage(Strict):
    """A message among the input items."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    id: str | None = None
    status: str | None = None


class InputCall(Strict):
    """A call among the input items."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Strict):
    """The result of a call among the input items."""

    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None


Items = Annotated[
    list[InputMessage | InputCall | InputCallOutput], Field(min_length=1, fail_fast=True)
]


class ResponsesRequest(Strict):
    """``POST /v1/responses``: the part that concerns text and functions, without stored state."""

    model: str | None = None
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Count | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=512, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: str | None = None
    include: Texts | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_small)] = None
    user: str | None = None
    service_tier: str | None = None
