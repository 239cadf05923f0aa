"""The two engines on a real language model, in both precisions: how far apart they are."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm_pair import MARKS, gaps, opened

from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.config.sections.data import WordProblemSettings
from exgrpo_cli.questions.made.word_problems import make_word_problems
from exgrpo_cli.questions.prompts import choose_template, encode
from exgrpo_cli.training.step.guards import MAX_MEAN_GAPS

pytestmark = [*MARKS, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_agree(smollm2: Path, dtype: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    questions = make_word_problems(WordProblemSettings(num_train=3, examples=0)).train
    prompts = [encode(choose_template("chat", tokenizer), question, tokenizer) for question in questions]
    requests = [
        RolloutRequest(question_id=str(index), prompt_ids=prompt, seeds=(2 * index, 2 * index + 1))
        for index, prompt in enumerate(prompts)
    ]
    with opened(smollm2, prompts[0], dtype=dtype, temperature=1.0, max_tokens=200, max_rows=8) as (policy, generator):
        groups = generator.generate(requests, SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8))
    assert gaps(policy, requests, groups).mean() <= MAX_MEAN_GAPS[dtype]
