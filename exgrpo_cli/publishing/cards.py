"""The cards: README.md of a published model, ledger and study, with the front matter that the hub reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.files import NUMBER, Shape, require_shape
from exgrpo_cli.config.settings import Config
from exgrpo_cli.publishing.features import FEATURES
from exgrpo_cli.questions.hub import parse_hub_id
from exgrpo_cli.runs.result import remarks

RESULT: Shape = {
    "protocol": {"benchmark": {"name": str}},
    "avg_at_k": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "questions": int,
    "k": int,
}
"""What a card takes from a `results.json`."""

USE = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}")
messages = [{{"role": "user", "content": {example!r}}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
response = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=True)
print(tokenizer.decode(response[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One held-out figure, with the set it is on."""

    set: str
    when: str
    """"before training" or "after training"."""
    value: float
    low: float
    high: float
    questions: int
    samples: int
    beside: str = ""
    """What other graders say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The model that training began with."""

    name: str
    hub_id: str
    """Empty for one that has none."""
    licence: Mapping[str, Any]
    """`license` and what belongs to it of the base's own card; empty where none is known."""


def run_scores(summary: Mapping[str, Any]) -> list[Score]:
    """The held-out scores that the run itself measured."""
    heldout = summary["heldout"]
    return [
        Score(
            set=heldout["set"],
            when=f"{when} training",
            value=score["pass_at_1"],
            low=score["low"],
            high=score["high"],
            questions=score["questions"],
            samples=score["samples"],
            beside=remarks(score),
        )
        for when in ("before", "after")
        if (score := heldout[when])
    ]


def evaluation_score(result: Mapping[str, Any], where: str) -> Score:
    """A score that `exgrpo evaluate` measured, from its `results.json`.

    Raises InputError naming `where` where it is damaged.
    """
    require_shape(result, RESULT, where)
    return Score(
        set=result["protocol"]["benchmark"]["name"],
        when="after training",
        value=result["avg_at_k"],
        low=result["low"],
        high=result["high"],
        questions=result["questions"],
        samples=result["k"],
    )


def model_card(
    repo: str, config: Config, base: Base, scores: Sequence[Score], *, steps: int, example: str, ledger: bool
) -> str:
    """The README of the trained model."""
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["exgrpo", "reinforcement-learning", "rlvr"],
        **base.licence,
    }
    if base.hub_id:
        front |= {"base_model": base.hub_id, "base_model_relation": "finetune"}
    if data := data_set_id(config):
        front["datasets"] = [data]
    licence = base.licence.get("license_name") or base.licence.get("license")
    said = f"Its licence ({licence}) holds for this model too." if licence else "Its licence is not known here."
    return front_matter(front) + "\n".join(
        [
            f"\n# {repo.split('/')[1]}\n",
            f"{base.name} after {steps} steps of {config.run.method} (seed {config.run.seed}) on {data_name(config)}, "
            "trained with exgrpo: reinforcement learning from verifiable rewards that replays its own correct "
            "reasoning ([arXiv 2510.02245](https://arxiv.org/abs/2510.02245)).\n",
            f"Base model: {base.hub_id or base.name}. {said if base.hub_id else ''}\n",
            "## Held-out results\n",
            score_table(scores),
            "Intervals are 95 % over questions; `config.toml` of the data set repeats the run.\n" if ledger else "",
            f"Its experience, every stored trajectory, is the data set [{repo}](https://huggingface.co/datasets/{repo}).\n"
            if ledger
            else "",
            "## Use",
            USE.format(repo=repo, example=example, max_new_tokens=config.rollout.max_response_tokens),
        ]
    )


def score_table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table, each with its set."""
    rows = [
        f"| {score.set} | {score.when} | {score.value:.3f} | {score.low:.3f} to {score.high:.3f}{score.beside} | "
        f"{score.questions} | {score.samples} |"
        for score in scores
    ]
    head = ["| set | when | pass@1 | 95 % interval | questions | samples each |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def ledger_card(repo: str, config: Config, tables: Mapping[str, str], num_rows: int) -> str:
    """The README of the ledger as a data set; `tables` are its configurations with the pattern of their files."""
    configs: list[dict[str, Any]] = [
        {"config_name": name, "data_files": [{"split": "train", "path": pattern}]} for name, pattern in tables.items()
    ]
    configs[0]["default"] = True
    front = {"configs": configs, "tags": ["exgrpo", "reinforcement-learning", "experience-replay"]}
    parts = [
        f"\n# Experience of {repo.split('/')[1]}\n",
        f"The experience ledger of {config.backbone.name} trained with {config.run.method} (seed {config.run.seed}) on "
        f"{data_name(config)}: {num_rows:,} responses with their token ids and behaviour log-probs, what was drawn "
        "from them, and what became of every question. The questions keep the licence of their source.\n",
        f'```python\nfrom datasets import load_dataset\n\ntrajectories = load_dataset("{repo}", "trajectories")\n```\n',
        f"```sh\nexgrpo replay-stats hf://{repo}\nexgrpo train --replay-from hf://{repo}\n```\n",
    ]
    for name in tables:
        parts.append(f"## {name}\n\n| column | meaning |\n|---|---|")
        parts.append("".join(f"| `{column}` | {meaning} |\n" for column, meaning in FEATURES[name].items()))
    return front_matter(front) + "\n".join(parts)


def study_card(repo: str, table: str, baseline: str, *, with_steps: bool) -> str:
    """The README of a study's tables; `table` is its result as Markdown, `with_steps` whether there are journals."""
    configs: list[dict[str, Any]] = [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}.parquet"}]}
        for name in ("runs", *(["steps"] if with_steps else []))
    ]
    configs[0]["default"] = True
    return (
        front_matter({"configs": configs, "tags": ["exgrpo", "reinforcement-learning", "ablation"]})
        + f"\n# {repo.split('/')[1]}\n\nA study of exgrpo: arms over seeds, held-out pass@1, against "
        f"{baseline or 'no baseline'}.\n\n{table}\n"
        "`runs` has one row per run with its final figures, `steps` one per run and training step (columns as in the "
        "journal of a run), `configs/` the settings of every run, `report.html` the page with figures.\n"
    )


def front_matter(values: Mapping[str, Any]) -> str:
    """The block of YAML that a card begins with."""
    import yaml

    return f"---\n{yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)}---\n"


def data_set_id(config: Config) -> str:
    """The hub id of the training questions; empty where they are not from the hub."""
    hub = None if Path(config.data.train).exists() else parse_hub_id(config.data.train)
    return hub.repo if hub else ""


def data_name(config: Config) -> str:
    """The training questions as others may read them: a file by its name alone."""
    return data_set_id(config) or Path(config.data.train).name
