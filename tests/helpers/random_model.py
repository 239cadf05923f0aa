"""A tiny random model for tests of evaluation, so that every path is real and the score is about 0."""

from pathlib import Path
from typing import Any

import torch
from question_sources import write

from exgrpo_cli.config.requests import EvaluationRequest
from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.evaluation.service import EvaluationReport, evaluate, plan_evaluation
from exgrpo_cli.models.tiny import make_model, make_tokenizer

SETTINGS = TinySettings(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=32)
WINDOW = 512


def save_random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(max_tokens=WINDOW)
    made = make_model(SETTINGS, tokenizer)
    made.config.max_position_embeddings = WINDOW
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def questions_file(folder: Path, count: int) -> Path:
    return write(folder / "sums.jsonl", *({"question": f"{n}+1=?", "answer": n + 1} for n in range(count)))


def request_for(model: Path, data: Path, output: Path, **values: Any) -> EvaluationRequest:
    protocol = {"max_tokens": 12, "samples": 3, "require_box": "always", **values.pop("protocol", {})}
    values |= {"data": data, "model": str(model), "output": output, "protocol": protocol}
    return EvaluationRequest(benchmarks=(), device="cpu", **values)


def run(request: EvaluationRequest) -> EvaluationReport:
    return evaluate(plan_evaluation(request), lambda text: None, quiet=True)
