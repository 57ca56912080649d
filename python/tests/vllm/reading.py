"""How vLLM's own request classes read the body of a request."""

import json
import re
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers.chat_utils.chat_message import parse_chat_messages
from vllm.sampling_params import SamplingParams


class RefusedError(Exception):
    """vLLM refuses the body."""


UNUSED = {
    "length_penalty",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "reasoning_effort",
}
"""Fields without an effect on modelled answers."""


class Reader:
    """vLLM's classes in front of a model with this name, context and vocabulary."""

    def __init__(self, model: str, context: int, vocabulary: int) -> None:
        self.model = model
        self.config: Any = SimpleNamespace(
            max_model_len=context,
            max_logprobs=20,
            get_vocab_size=lambda: vocabulary,
            multimodal_config=None,
            enable_prompt_embeds=False,
            is_multimodal_model=False,
            allowed_local_media_path="",
            allowed_media_domains=None,
            hf_config=SimpleNamespace(model_type=""),
        )

    def read(self, chat: bool, body: bytes) -> dict[str, Any]:
        """The request in its plainest form, of which nothing needs a conversion.

        Raises
        ------
        RefusedError
            If a vLLM server would not answer it.
        """
        try:
            members = json.loads(body)
            if not isinstance(members, dict):
                raise RefusedError("not an object")
            if chat:
                return self.chat(ChatCompletionRequest.model_validate(members))
            return self.completion(CompletionRequest.model_validate(members))
        except RefusedError:
            raise
        except ValidationError as error:
            at = [(".".join(map(str, of["loc"])), of["type"]) for of in error.errors()]
            raise RefusedError("; ".join(f"{loc} {kind}" for loc, kind in at)) from error
        # vLLM's, and the TypeErrors and others that its server answers with 500.
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    def chat(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """The plain form of a chat."""
        if not request.messages:
            raise RefusedError("no message")
        messages, _, _ = parse_chat_messages(request.messages, self.config, "string")
        limit = request.max_completion_tokens
        if limit is None:
            limit = request.max_tokens
        self.check(request, limit)
        plain = self.plain(request)
        plain.pop("max_tokens", None)
        plain.pop("max_completion_tokens", None)
        if limit is not None:
            plain["max_tokens"] = limit
        for message in messages:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        plain["messages"] = messages
        if request.continue_final_message and request.add_generation_prompt:
            raise RefusedError("continue_final_message with add_generation_prompt")
        if request.tools:
            plain["tools"] = [tool.model_dump() for tool in request.tools]
            if request.tool_choice in (None, "none"):
                plain["tool_choice"] = "none"
        return plain

    def completion(self, request: CompletionRequest) -> dict[str, Any]:
        """The plain form of a completion."""
        self.check(request, request.max_tokens)
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        if not prompts:
            raise RefusedError("no prompt")
        for prompt in prompts:
            ids = prompts if isinstance(prompt, int) else prompt
            if isinstance(ids, list) and any(
                token >= self.config.get_vocab_size() for token in ids
            ):
                raise RefusedError("token id out of vocabulary")
            if ids in ("", []):
                raise RefusedError("empty prompt")
        plain = self.plain(request)
        plain["prompt"] = request.prompt
        return plain

    def check(self, request: Any, limit: int | None) -> None:
        """What the server checks behind the class."""
        request.build_tok_params(self.config)
        if request.model not in (None, "", self.model):
            raise RefusedError("no such model")
        if limit is None:
            limit = self.config.max_model_len
        params: SamplingParams = request.to_sampling_params(limit, {})
        params._validate_logprobs(self.config)
        params._validate_logit_bias(self.config)
        params._validate_stop_token_ids(self.config)
        params._validate_allowed_token_ids(self.config)
        if params.structured_outputs is not None:
            structured(params.structured_outputs)
        self.seed = params.seed

    def plain(self, request: Any) -> dict[str, Any]:
        """The fields that were sent, converted; without those that say nothing."""
        plain = {}
        for name in request.model_fields_set & type(request).model_fields.keys():
            value = getattr(request, name)
            if (
                name in UNUSED
                or value is None
                or value == type(request).model_fields[name].get_default()
            ):
                continue
            if hasattr(value, "model_dump"):
                value = value.model_dump(by_alias=True, exclude_none=True)
            elif hasattr(value, "__dataclass_fields__"):
                value = {
                    k: v
                    for k, v in vars(value).items()
                    if v is not None and v is not False and k[0] != "_"
                }
            plain[name] = value
        # An empty one is none, also without a stream.
        if not request.stream:
            plain.pop("stream_options", None)
        # -1 draws a seed (`SamplingParams.__post_init__`).
        plain.pop("seed", None)
        if self.seed is not None:
            plain["seed"] = self.seed
        return plain


def structured(wanted: Any) -> None:
    """What any backend for structured outputs refuses, or answers with 500."""
    if wanted.choice is not None and not wanted.choice:
        raise RefusedError("no choices")
    if wanted.regex is not None:
        re.compile(wanted.regex)
    if isinstance(wanted.json, str):
        json.loads(wanted.json)
