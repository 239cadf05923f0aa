"""Prompt templates: the exact text and ids for a tokenizer with a chat template, without one, and with BOS."""

import hashlib

import numpy as np
import pytest
from question_sources import CHAT, question, tokenizer
from tokenizers import processors

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions.prompts import (
    THOUGHT_SOLUTION_SYSTEM,
    answer_format,
    choose_template,
    encode,
    encode_all,
    encode_within,
    render,
    seen_text,
)

PLAIN = question(("user", "2+2=?"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bare", "2+2=?"),
        ("step-by-step", "User: 2+2=?\nAnswer: Let's think step by step.\n"),
        ("chat", "[user]2+2=?[assistant]"),
        ("auto", "[user]2+2=?[assistant]"),
        ("thought-solution", f"[system]{THOUGHT_SOLUTION_SYSTEM}[user]2+2=?[assistant]<think>\n"),
    ],
)
def test_the_text_of_each_template(name, text):
    tok = tokenizer()
    assert render(choose_template(name, tok), PLAIN, tok) == text


def test_the_published_system_message_is_carried_word_for_word():
    # sha256 of the system message in the rows of the published evaluation file.
    published = "a8747f1674d341836ab8fae3c29263fee4dd555f07259cdbc6dadf4104ea8926"
    assert hashlib.sha256(THOUGHT_SOLUTION_SYSTEM.encode()).hexdigest() == published


def test_a_system_message_is_replaced_kept_or_left_out():
    tok = tokenizer()
    published = question(("system", THOUGHT_SOLUTION_SYSTEM), ("user", "2+2=?"))
    own = question(("system", "Be brief."), ("user", "2+2=?"))
    thought, chat, bare = (choose_template(name, tok) for name in ("thought-solution", "chat", "bare"))
    assert render(thought, published, tok) == render(thought, own, tok) == render(thought, PLAIN, tok)
    assert render(chat, published, tok) == "[user]2+2=?[assistant]"
    assert render(chat, own, tok) == "[system]Be brief.[user]2+2=?[assistant]"
    assert render(bare, published, tok) == "2+2=?"
    # Braces in a question are text.
    asked = question(("user", "What is \\frac{1}{2} of {question}?"))
    assert "What is \\frac{1}{2} of {question}?" in render(choose_template("step-by-step", tok), asked, tok)


@pytest.mark.parametrize(
    ("chat_template", "opens_think", "requires_box"),
    [
        (CHAT, False, False),
        (CHAT.replace("[assistant]", "[assistant]<think>\n"), True, False),
        ("Put your answer within \\boxed{}." + CHAT, False, True),
        ("Think in <think> and </think>." + CHAT, False, False),
    ],
)
def test_what_a_chat_template_asks_for_is_read_off_its_text(chat_template, opens_think, requires_box):
    template = choose_template("chat", tokenizer(chat_template))
    assert (template.opens_think, template.requires_box) == (opens_think, requires_box)
    form = answer_format(template, require_eos=True)
    assert (form.opens_think, form.requires_box, form.require_eos) == (opens_think, requires_box, True)


def test_a_box_can_be_overridden_and_a_think_block_is_not_opened_twice():
    tok = tokenizer(CHAT.replace("[assistant]", "[assistant]<think>\n"))
    assert choose_template("chat", tok, require_box="always").requires_box
    assert choose_template("thought-solution", tok).requires_box
    assert not choose_template("thought-solution", tok, require_box="never").requires_box
    assert render(choose_template("thought-solution", tok), PLAIN, tok).endswith("[assistant]<think>\n")


def test_plain_text_gets_the_tokenizers_special_tokens_and_a_chat_text_does_not():
    tok = tokenizer()
    bare, chat = (choose_template(name, tok) for name in ("bare", "chat"))
    ids = encode(bare, PLAIN, tok)
    # <s>, then the characters 2 + 2 = ? with ids 1 + ord - 32.
    assert ids.tolist() == [0, 19, 12, 19, 30, 32] and ids.dtype == np.int32
    assert len(encode(chat, PLAIN, tok)) == len("[user]2+2=?[assistant]") and 0 not in encode(chat, PLAIN, tok)
    assert (seen_text(bare, PLAIN, tok), seen_text(chat, PLAIN, tok)) == ("<s>2+2=?", "[user]2+2=?[assistant]")
    around = processors.TemplateProcessing(single="<s> $A <s> <s>", special_tokens=[("<s>", 0)])
    tok.backend_tokenizer.post_processor = around
    # 5 characters and the three that the tokenizer adds.
    assert len(encode(bare, PLAIN, tok)) == 8
    assert seen_text(bare, PLAIN, tok).replace(" ", "") == "<s>2+2=?<s><s>"


def test_lengths_over_the_limit_name_the_longest_question():
    tok = tokenizer()
    bare = choose_template("bare", tok)
    asked = [PLAIN, question(("user", "1+2+3=?")), question(("user", "12345678"))]
    assert [len(ids) for ids in encode_all(bare, asked, tok)] == [6, 8, 9]
    encode_within(bare, asked, tok, max_tokens=9)
    with pytest.raises(InputError, match=f"2 of 3 prompts .* limit of 7 tokens, .*question {asked[2].id} with 9:"):
        encode_within(bare, asked, tok, max_tokens=7)


def test_refusals_name_what_to_do():
    tok = tokenizer()
    with pytest.raises(InputError, match=r"'thougt-solution' is not known\. Did you mean 'thought-solution'"):
        choose_template("thougt-solution", tok)
    with pytest.raises(InputError, match=r"'thought-solution' needs a chat template .* 'step-by-step' or 'bare'"):
        choose_template("thought-solution", tokenizer(None))
    several = question(("user", "Hello"), ("assistant", "Yes?"), ("user", "2+2=?"))
    with pytest.raises(InputError, match="has 3 turns and the template 'bare' takes one"):
        render(choose_template("bare", tok), several, tok)
    assert render(choose_template("chat", tok), several, tok) == "[user]Hello[assistant]Yes?[user]2+2=?[assistant]"
    picky = tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT)
    with pytest.raises(InputError, match=r"roles \['system', 'user'\] \(no system\)"):
        choose_template("thought-solution", picky)
