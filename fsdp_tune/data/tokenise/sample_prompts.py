"""Encode the prompts of `training.sample` as a user of the trained model would send them."""

from __future__ import annotations

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.format.templates import suggestion
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.chat import template_time_limit
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.recipe.schema.recipe import Recipe

MOST_PROMPTS = 64
"""Each rank generates its share in one batch."""


PROMPT_ROLES = ("system", "developer", "user", "assistant", "tool")


def sample_prompts(recipe: Recipe, encoder: Encoder) -> list[list[int]]:
    """Return the ids of each prompt of `training.sample`: texts with the tokenizer's own prefix, chats with
    the generation prompt.

    Raises: usage error for a prompt that is empty, as long as `data.max_length`, or that the chat template
    rejects.
    """
    sample = recipe.training.sample
    if sample is None:
        return []
    if not 1 <= len(sample.prompts) <= MOST_PROMPTS:
        message = (
            f"`training.sample.prompts` has {len(sample.prompts)} prompts, and takes 1 to {MOST_PROMPTS}"
        )
        raise usage_error("sample-prompt", message, where=Where(key="training.sample.prompts"))
    found: list[list[int]] = []
    for index, prompt in enumerate(sample.prompts):
        where = Where(key=f"training.sample.prompts[{index}]")
        if isinstance(prompt, str):
            ids = [*encoder.prefix_ids, *encoder.encode([prompt])[0]]
        else:
            (ids,) = encoder.encode([_rendered_prompt(prompt, encoder, where)])
        if not ids:
            raise usage_error("sample-prompt", "the prompt has no token", where=where)
        if len(ids) >= recipe.data.max_length:
            message = (
                f"the prompt has {len(ids):,} tokens, and `data.max_length` is {recipe.data.max_length:,}"
            )
            raise usage_error(
                "sample-prompt",
                message,
                where=where,
                hint="shorten it: the model is trained on no longer rows",
            )
        found.append(ids)
    return found


def _rendered_prompt(messages: list[dict[str, str]], encoder: Encoder, where: Where) -> str:
    for message in messages:
        if set(message) != {"role", "content"} or message["role"] not in PROMPT_ROLES:
            hint = f"roles are {', '.join(PROMPT_ROLES)}"
            raise usage_error(
                "sample-prompt", "a message of a prompt needs `role` and `content`", where=where, hint=hint
            )
    if not messages or messages[-1]["role"] == "assistant":
        raise usage_error(
            "sample-prompt", "a chat to answer ends with a message that is not the assistant's", where=where
        )
    if encoder.chat_template is None:
        hint = f"{suggestion(encoder.encode)}, or write the prompt as text"
        raise usage_error(
            "no-chat-template",
            "the prompt is a chat, and the tokenizer has no chat template",
            where=where,
            hint=hint,
        )
    try:
        return render_prompt(Chat(messages, None), encoder.chat_template, encoder)
    except RowError as error:
        raise usage_error("sample-prompt", str(error), where=where) from error


def render_prompt(chat: Chat, template: str, encoder: Encoder) -> str:
    """Return a conversation with the generation prompt, which is what the model receives. Raises: RowError if
    the template rejects it."""
    try:
        with template_time_limit():
            return encoder.render(
                chat.messages, template, tools=chat.tools, generation_prompt=True, **chat.variables
            )
    except (RowError, FsdpTuneError):  # of the time limit
        raise
    except Exception as error:
        raise RowError(f"the chat template rejects the prompt: {first_line(error)}") from error
