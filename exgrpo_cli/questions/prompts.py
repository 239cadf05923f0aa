"""Prompt templates: from a question to the exact text and token ids the model sees.

A template is applied when training or evaluating, never baked into a question file. Special tokens written by a chat
template are in its text already; a plain text gets the tokenizer's own (Llama's BOS) while it is encoded.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.base import bounds, data
from exgrpo_cli.base.errors import InputError, first_line, nearest
from exgrpo_cli.base.types import AnswerFormat, Message, Question
from exgrpo_cli.config.sections.data import RequireBox
from exgrpo_cli.questions.question_file import is_unicode, question_text

THINK = "<think>\n"
_BATCH = 64
TEMPLATE_SECONDS = 10.0
TEMPLATE_CHARS = 100_000
TEMPLATE_BYTES = 2**30
"""Bounds on the template of a stranger's tokenizer: time for one prompt, characters around it, memory."""
MOST_GROWTH = 64
"""Characters, or special tokens, that a stranger's tokenizer may make of one."""
_CHARS_A_SECOND = 50_000
"""Speed that any tokenizer has, on a loaded machine too."""
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that a template's own code may raise beside those of Jinja."""

Tokenizer = Any
"""A tokenizer of transformers."""
Ids = Int32[np.ndarray, " prompt_tokens"]
"""Token ids of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """Template that makes a prompt of a question, and what it asks of the answer."""

    name: str
    system: str | None = None
    """Replaces the source's system message. Without one a chat template keeps it, unless it is a published template's;
    a plain text has no place for it."""
    question_form: str | None = None
    """Plain text around `{question}`; None is the tokenizer's chat template."""
    opens_think: bool = False
    """The prompt ends with an opened `<think>`."""
    requires_box: bool = False
    """A response without `\\boxed{}` has no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimit:
    """The longest prompt a backbone is to see."""

    template: Template
    tokenizer: Tokenizer
    max_tokens: int

    def reasons(self, questions: Sequence[Question]) -> list[tuple[str, str] | None]:
        """The reason to leave a question out whose prompt is longer, with an example; None where it is not."""
        encoded = encode_all(self.template, questions, self.tokenizer)
        return [
            (f"prompt over {self.max_tokens} tokens", f"{question.id} ({len(ids)} tokens): {question_text(question)}")
            if len(ids) > self.max_tokens
            else None
            for question, ids in zip(questions, encoded, strict=True)
        ]


TEMPLATES = {name: Template(name=name, **said) for name, said in data.tables(__file__, "templates.toml").items()}
THOUGHT_SOLUTION_SYSTEM = TEMPLATES["thought-solution"].system


def choose_template(name: str, tokenizer: Tokenizer | None, *, require_box: RequireBox = "auto") -> Template:
    """The named template ("auto" is `chat`) as it is with this tokenizer; without one, for a server that has its own.

    For `chat`, whether the prompt opens `<think>` and asks for `\\boxed{}` is read off the rendered text of an empty
    question. `require_box` overrides what the template asks for, but for "auto".

    Raises InputError for an unknown name, and where the template needs a chat template and the tokenizer has none.
    """
    name = "chat" if name == "auto" else name
    if name not in TEMPLATES:
        raise InputError(f"Prompt template {name!r} is not known.{nearest(name, ['auto', *TEMPLATES])}")
    template = TEMPLATES[name]
    if template.question_form is None and tokenizer is not None:
        if not tokenizer.chat_template:
            raise InputError(
                f"Prompt template {name!r} needs a chat template and this backbone's tokenizer has none: "
                "use 'step-by-step' or 'bare' (--set data.template=step-by-step; of evaluate: --template step-by-step)."
            )
        [text] = _chat_texts(template, [[Message(role="user", content="")]], tokenizer)
        template = replace(template, opens_think=_is_think_open(text), requires_box="\\boxed" in text)
    return template if require_box == "auto" else replace(template, requires_box=require_box == "always")


def answer_format(template: Template, *, require_eos: bool) -> AnswerFormat:
    """Rules for finding the answer in a response to this template's prompts."""
    return AnswerFormat(opens_think=template.opens_think, requires_box=template.requires_box, require_eos=require_eos)


def render(template: Template, question: Question, tokenizer: Tokenizer) -> str:
    """The prompt as text; of a plain one without the special tokens that `encode` adds.

    Raises InputError where a plain-text template meets a question of several turns, or the tokenizer's chat template
    refuses the messages.
    """
    if template.question_form is not None:
        turns = [message for message in question.prompt if message.role != "system"]
        if len(turns) != 1:
            unlike = f"has {len(turns)} turns and the template {template.name!r} takes one"
            raise InputError(f"Question {question.id} {unlike}: use a chat template (--set data.template=chat).")
        return template.question_form.replace("{question}", turns[0].content)
    return _chat_texts(template, [messages_for(template, question)], tokenizer)[0]


def messages_for(template: Template, question: Question) -> list[Message]:
    """Those that a chat template is given, but for its own system message."""
    # Data sets with the paper's system message were published with a template already applied.
    own = [each for each in question.prompt if each.role == "system" and each.content != THOUGHT_SOLUTION_SYSTEM]
    turns = [message for message in question.prompt if message.role != "system"]
    return [*(own if template.system is None else []), *turns]


def seen_text(template: Template, question: Question, tokenizer: Tokenizer) -> str:
    """The exact text the model sees, special tokens included. Raises InputError as `render` does."""
    text = render(template, question, tokenizer)
    ids = _token_ids(template, [question], tokenizer)[0]
    own = _tokenized([text], tokenizer, add_special_tokens=False)[0]
    starts = (start for start in range(len(ids) - len(own) + 1) if ids[start : start + len(own)] == own)
    start = next(starts, 0)
    return f"{tokenizer.decode(ids[:start])}{text}{tokenizer.decode(ids[start + len(own) :])}"


def encode(template: Template, question: Question, tokenizer: Tokenizer) -> Ids:
    """Token ids of the prompt."""
    return np.asarray(_token_ids(template, [question], tokenizer)[0], dtype=np.int32)


def encode_all(template: Template, questions: Sequence[Question], tokenizer: Tokenizer) -> list[Ids]:
    """Token ids of each question's prompt."""
    batches = (questions[start : start + _BATCH] for start in range(0, len(questions), _BATCH))
    return [np.asarray(ids, dtype=np.int32) for batch in batches for ids in _token_ids(template, batch, tokenizer)]


def encode_within(
    template: Template, questions: Sequence[Question], tokenizer: Tokenizer, *, max_tokens: int
) -> dict[str, Ids]:
    """Token ids of each prompt, by the question's id.

    Raises InputError naming the longest question, its length and the limit where a prompt exceeds `max_tokens`.
    """
    encoded = encode_all(template, questions, tokenizer)
    lengths = np.array([len(ids) for ids in encoded])
    num_over = int((lengths > max_tokens).sum())
    if num_over:
        longest = int(lengths.argmax())
        raise InputError(
            f"{num_over} of {len(questions)} prompts are over the limit of {max_tokens} tokens, the longest being "
            f"question {questions[longest].id} with {lengths[longest]}: raise data.max_prompt_tokens, or leave them "
            f"out with `exgrpo prepare FILE --backbone NAME --max-prompt-tokens {max_tokens}`."
        )
    return {question.id: ids for question, ids in zip(questions, encoded, strict=True)}


def _token_ids(template: Template, questions: Sequence[Question], tokenizer: Tokenizer) -> list[list[int]]:
    if template.question_form is None:
        texts = _chat_texts(template, [messages_for(template, question) for question in questions], tokenizer)
    else:
        texts = [render(template, question, tokenizer) for question in questions]
    return _tokenized(texts, tokenizer, add_special_tokens=template.question_form is not None)


def _tokenized(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of texts. Raises InputError where the tokenizer fails, or takes far longer than any does."""
    seconds = TEMPLATE_SECONDS + sum(map(len, texts)) / _CHARS_A_SECOND
    try:
        with bounds.time_limit(seconds):
            # verbose=False: a prompt over the limit is our error to report, not a warning of the tokenizer.
            ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except bounds.Expired:
        late = f"is not done with {len(texts)} prompts after {seconds:.0f} s"
        raise InputError(f"The backbone's tokenizer {late}: use a backbone you trust.") from None
    except BaseException as error:
        # Rust's panic, over a pattern that never matches, is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        reason = first_line(error)
        raise InputError(f"The backbone's tokenizer fails at a prompt ({reason}): use a backbone you trust.") from error
    return ids


def require_bounded(tokenizer: Tokenizer, where: str) -> None:
    """Raise InputError where a tokenizer could make more than MOST_GROWTH characters or tokens of one.

    Read off its parts, without a text: a normalizer that replaces a letter by 100 MB would fill the memory within one
    call that nothing can end.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name, None)
        growth = 0 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MOST_GROWTH:
            most = f"{growth:.0e} of one character, over {MOST_GROWTH}"
            raise InputError(f"{where}: the {name} of tokenizer.json may make {most}: use a tokenizer you trust.")


def _growth(part: Any) -> float:
    """Bound on the characters or tokens that a part of a tokenizer makes of one; parts of a sequence multiply."""
    if isinstance(part, list):
        return math.prod(max(1.0, _growth(own)) for own in part)
    if not isinstance(part, dict):
        return 1.0
    own = 1.0
    if part.get("type") == "Replace":
        own = len(part["content"]) / max(1, len(part["pattern"].get("String", "")))
    elif part.get("type") == "Prepend":
        own = len(part["prepend"])
    elif part.get("type") == "TemplateProcessing":
        lengths = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
        named = (piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece)
        own = sum(lengths.get(name, 1) for name in named)
    inner = (part.get(name, []) for name in ("normalizers", "pretokenizers", "processors", "decoders"))
    return max(1.0, own) * math.prod(map(_growth, inner))


def _chat_texts(template: Template, asked: Sequence[Sequence[Message]], tokenizer: Tokenizer) -> list[str]:
    """The prompts of few conversations by the tokenizer's own template: the limits are those of all together."""
    import jinja2

    system = [] if template.system is None else [{"role": "system", "content": template.system}]
    conversations = [[*system, *({"role": each.role, "content": each.content} for each in own)] for own in asked]
    texts: list[str] = []
    try:
        with bounds.time_limit(TEMPLATE_SECONDS), bounds.memory_limit(TEMPLATE_BYTES):
            for turns in conversations:
                texts.append(str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))
    except bounds.Expired:
        raise _untrusted(f"is not done with a prompt after {TEMPLATE_SECONDS:g} s") from None
    except MemoryError:
        raise _untrusted(f"needs more than {TEMPLATE_BYTES / 2**30:g} GiB for a prompt") from None
    except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
        roles = [turn["role"] for turn in conversations[len(texts)]]
        refusal, remedy = f"the roles {roles} ({error})", "use another template (--set data.template=bare)"
        raise InputError(f"The backbone's chat template refuses a prompt with {refusal}: {remedy}.") from error
    for text, turns in zip(texts, conversations, strict=True):
        if len(text) > TEMPLATE_CHARS + sum(len(turn["content"]) for turn in turns):
            raise _untrusted(f"makes a prompt of {len(text):,} characters, over {TEMPLATE_CHARS:,} beyond the question")
    if not all(map(is_unicode, texts)):
        raise _untrusted("makes a prompt that is not valid Unicode")
    if TEMPLATES[template.name].opens_think:
        return [text if _is_think_open(text) else text + THINK for text in texts]
    return texts


def _untrusted(fault: str) -> InputError:
    remedy = "use another template (--set data.template=bare), or a backbone you trust"
    return InputError(f"The backbone's chat template {fault}: {remedy}.")


def _is_think_open(text: str) -> bool:
    return text.rstrip().endswith("<think>")
